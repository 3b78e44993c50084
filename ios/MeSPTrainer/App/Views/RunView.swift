import Charts
import MeSPAppModel
import SwiftUI

struct RunView: View {
    @Environment(AppModel.self) private var model

    private var controller: RunController { model.controller }

    var body: some View {
        @Bindable var screen = model.screen
        List {
            Section {
                StateLabel(state: controller.state)
                if let progress = model.progress {
                    ProgressView(value: progress.part) {
                        Text(progress.stepWords.localized).monospacedDigit()
                    } currentValueLabel: {
                        if controller.isRunning, let left = progress.timeWords { Text(left.localized) }
                    }
                }
                if controller.isRunning { buttons }
            }
            if !model.textNotices.isEmpty {
                Section("Text") { NoticeRows(notices: model.textNotices.map(\.localized)) }
            }
            if let run = model.shownRun { LearnedSection(run: run) }
            LogSections(log: controller.log)
            if controller.isRunning {
                Section {
                    #if os(iOS)
                        Toggle("Overnight", isOn: $screen.isOvernight)
                    #endif
                    Toggle("Keep the screen on", isOn: $screen.keepsAwake).disabled(model.screen.isOvernight)
                } footer: {
                    #if os(iOS)
                        Text(model.screen.overnightAdvice.localized)
                    #endif
                }
            }
        }
        .navigationTitle(controller.settings?.method.name ?? String(localized: "Run"))
        .toolbar { Button("New Run") { model.showsSetup = true } }
    }

    private var buttons: some View {
        HStack {
            if controller.pauseWanted {
                Button("Resume", systemImage: "play.fill") { controller.resume() }
            } else {
                Button("Pause", systemImage: "pause.fill") { controller.pause() }
            }
            Spacer()
            Button("Stop", systemImage: "stop.fill", role: .destructive) { controller.stop() }
                .accessibilityHint("Saves the adapters and ends the run")
        }
        .buttonStyle(.bordered)
        .disabled(controller.stopWanted)
    }
}

struct LogSections: View {
    let log: LogSummary

    private var training: String { String(localized: "Training") }

    var body: some View {
        if let strength = log.strength {
            Section { Text(strength.sentence.localized) }
        }
        Section("Loss, nats per token") {
            Chart {
                ForEach(log.curve { Double($0.loss) }) {
                    LineMark(x: .value("Step", $0.id), y: .value("Loss", $0.value), series: .value("Data", training))
                        .foregroundStyle(by: .value("Data", training))
                }
                ForEach(log.evals.filter { $0.split == "valid" }, id: \.step) {
                    PointMark(x: .value("Step", $0.step), y: .value("Loss", Double($0.loss)))
                        .foregroundStyle(by: .value("Data", String(localized: "Held out")))
                }
            }
            .chartYScale(domain: .automatic(includesZero: false))
            .frame(height: 180)
            .accessibilityLabel("Loss by step")
            .accessibilityValue(log.steps.last.map { "\($0.loss.formatted()) at step \($0.step)" } ?? "No step yet")
            .accessibilityIdentifier("loss-chart")
        }
        Section("Footprint, MB") {
            Chart {
                ForEach(log.curve { Double($0.footprintPeakBytes) / 1e6 }) {
                    LineMark(x: .value("Step", $0.id), y: .value("Peak", $0.value))
                }
                if let plan = log.prediction {
                    RuleMark(y: .value("Predicted", Double(plan.predictedPeakBytes) / 1e6))
                        .lineStyle(StrokeStyle(dash: [4]))
                        .annotation(position: .top, alignment: .trailing) { Text("Predicted").font(.caption2) }
                }
            }
            .frame(height: 140)
            .accessibilityLabel("Peak footprint by step")
            .accessibilityValue(log.peakFootprint?.bytes ?? String(localized: "No step yet"))
            .accessibilityIdentifier("footprint-chart")
        }
        Section("Figures") {
            if let loss = log.steps.last?.loss {
                LabeledContent("Loss", value: loss.formatted(.number.precision(.fractionLength(3))))
            }
            if let peak = log.peakFootprint { LabeledContent("Peak footprint", value: peak.bytes) }
            if let seconds = log.stepSeconds {
                let time = seconds.formatted(.number.precision(.fractionLength(2)))
                LabeledContent("Time of a step", value: String(localized: "\(time) s"))
            }
            if let speed = log.tokensPerSecond, let inLoss = log.lossTokensPerSecond {
                LabeledContent("Tokens per second", value: speed.formatted(.number.precision(.fractionLength(0))))
                LabeledContent(
                    "Tokens per second in the loss", value: inLoss.formatted(.number.precision(.fractionLength(0))))
            }
            if let state = log.steps.last?.thermalState { LabeledContent("Thermal state", value: state) }
            if let used = log.batteryUsed {
                LabeledContent("Battery used", value: used.formatted(.percent.precision(.fractionLength(0))))
            }
        }
        if !log.events.isEmpty {
            Section("Events") {
                ForEach(log.events.reversed()) { event in
                    VStack(alignment: .leading) {
                        Text(event.message.localized)
                        Text(event.time, format: .dateTime.hour().minute().second())
                            .font(.caption).foregroundStyle(.secondary)
                    }
                    .accessibilityElement(children: .combine)
                }
            }
        }
    }
}

struct StateLabel: View {
    let state: RunController.State

    var body: some View {
        switch state {
        case .idle: Label("Ready", systemImage: "circle")
        case .preparing: Label("Checking the bundle", systemImage: "checkmark.shield")
        case .training: TintedLabel(String(localized: "Training"), systemImage: "flame.fill", tint: .green)
        case .paused(let reason):
            TintedLabel(reason.sentence.localized, systemImage: "pause.circle.fill", tint: .orange)
        case .finished(.stopped): Label("Stopped, adapters saved", systemImage: "stop.circle")
        case .finished:
            TintedLabel(
                String(localized: "Finished, adapters saved"), systemImage: "checkmark.circle.fill", tint: .green)
        case .failed(let sentence):
            TintedLabel(sentence.localized, systemImage: "exclamationmark.triangle.fill", tint: .red)
        }
    }
}

struct NightView: View {
    @Environment(AppModel.self) private var model
    var body: some View {
        Button {
            model.screen.isOvernight = false
        } label: {
            VStack(spacing: 8) {
                if let progress = model.progress {
                    Text(progress.stepWords.localized).font(.title2).monospacedDigit()
                    if let left = progress.timeWords { Text(left.localized).font(.footnote) }
                }
                StateLabel(state: model.controller.state).font(.footnote)
                Text("Tap to light the screen").font(.caption)
            }
            .foregroundStyle(.gray)
            .frame(maxWidth: .infinity, maxHeight: .infinity)
            .contentShape(.rect)
        }
        .buttonStyle(.plain)
        .background(.black)
        .coversScreen()
    }
}
