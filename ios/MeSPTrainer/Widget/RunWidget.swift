import ActivityKit
import SwiftUI
import WidgetKit

/// The run in progress, on the lock screen and in the Dynamic Island.
@main struct RunWidget: Widget {
    var body: some WidgetConfiguration {
        ActivityConfiguration(for: RunAttributes.self) { context in
            VStack(alignment: .leading, spacing: 8) {
                Text(context.attributes.title).font(.headline)
                RunStatus(state: context.state)
            }
            .padding()
        } dynamicIsland: { context in
            DynamicIsland {
                DynamicIslandExpandedRegion(.center) { Text(context.attributes.title).font(.headline) }
                DynamicIslandExpandedRegion(.bottom) { RunStatus(state: context.state) }
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

/// How far the run is, and why it waits.
private struct RunStatus: View {
    let state: RunAttributes.ContentState

    var body: some View {
        VStack(alignment: .leading, spacing: 4) {
            ProgressView(value: state.part) {
                HStack {
                    Text(state.step)
                    Spacer()
                    Text([state.loss, state.timeLeft].compactMap { $0 }.joined(separator: ", "))
                }
                .font(.caption).monospacedDigit()
            }
            if let note = state.note { Text(note).font(.caption).foregroundStyle(.secondary) }
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
