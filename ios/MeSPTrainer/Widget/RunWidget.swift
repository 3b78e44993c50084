import ActivityKit
import SwiftUI
import WidgetKit

@main struct RunWidget: Widget {
    var body: some WidgetConfiguration {
        ActivityConfiguration(for: RunAttributes.self) { context in
            VStack(alignment: .leading, spacing: 8) {
                Text(context.attributes.title).font(.headline)
                RunStatus(context: context)
            }
            .padding()
        } dynamicIsland: { context in
            DynamicIsland {
                DynamicIslandExpandedRegion(.center) { Text(context.attributes.title).font(.headline) }
                DynamicIslandExpandedRegion(.bottom) { RunStatus(context: context) }
            } compactLeading: {
                RunGauge(state: context.state)
            } compactTrailing: {
                Text(context.state.loss ?? context.state.part.percent).monospacedDigit()
            } minimal: {
                RunGauge(state: context.state)
            }
        }
    }
}

private struct RunStatus: View {
    let context: ActivityViewContext<RunAttributes>

    private var state: RunAttributes.ContentState { context.state }
    private var note: String? { context.isStale ? context.attributes.staleNote : state.note }

    var body: some View {
        VStack(alignment: .leading, spacing: 4) {
            ProgressView(value: state.part) {
                HStack {
                    Text(state.step)
                    Spacer()
                    Text(
                        [state.loss, context.isStale ? nil : state.timeLeft].compactMap { $0 }.joined(separator: ", "))
                }
                .font(.caption).monospacedDigit()
            }
            if let note { Text(note).font(.caption).foregroundStyle(.secondary) }
        }
        .accessibilityElement(children: .combine)
    }
}

private struct RunGauge: View {
    let state: RunAttributes.ContentState

    var body: some View {
        ProgressView(value: state.part).progressViewStyle(.circular).accessibilityValue(state.step)
    }
}

extension Double {
    fileprivate var percent: String { formatted(.percent.precision(.fractionLength(0))) }
}
