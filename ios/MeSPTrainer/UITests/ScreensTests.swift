import XCTest

/// Goes through the app's screens in the simulator, with a recorded run.
///
/// For each screen the test attaches a screenshot, the elements that VoiceOver finds, and the findings of Apple's accessibility audit. Findings do
/// not fail the test, because many concern the system's own views.
final class ScreensTests: XCTestCase {
    /// The time limit for an element to appear on a busy machine, in seconds.
    private static let patience: TimeInterval = 120

    override func setUpWithError() throws {
        #if !targetEnvironment(simulator)
            throw XCTSkip("A device trains, and shows no recorded run.")
        #endif
    }

    @MainActor func testTrain() {
        let app = launched()
        see(app.navigationBars["New Run"])
        see(app.saying("The iOS simulator lacks the GPU that MLX needs"))
        see(app.buttons["Show a Recorded Run"])
        see(app.saying("A small demo model learns to write like the reference manual"))
        XCTAssertFalse(see(app.buttons["Start"]).isEnabled, "nothing can be trained here")
        keep(app, as: "Train")
        see(app.buttons["More"]).tap()
        see(app.navigationBars["More"])
        see(app.buttons["Start"])
        keep(app, as: "More")
    }

    @MainActor func testChoices() {
        let app = launched()
        see(app.navigationBars["New Run"])
        see(app.buttons["More"]).tap()
        reach(app.identified("train-on"), in: app).tap()
        see(app.buttons["My choices"]).tap()
        reach(app.saying("Under Try It, choose the better of two answers"), in: app)
        keep(app, as: "Choices")
    }

    @MainActor func testRecordedRun() {
        let app = launched()
        showRecordedRun(in: app)
        see(app.navigationBars["MeSP"])
        reach(app.identified("loss-chart"), in: app)
        keep(app, as: "Run")
        reach(app.identified("footprint-chart"), in: app)
        see(app.buttons["New Run"]).tap()
        see(app.navigationBars["New Run"])
    }

    @MainActor func testTry() {
        let app = launched(at: "Try")
        see(app.navigationBars["Try It"])
        see(app.identified("prompt"))
        see(app.switches["As a message to the model"])
        XCTAssertFalse(see(app.buttons["Write"]).isEnabled, "there is no prompt")
        keep(app, as: "Try")
        reach(app.saying("Train a run first; until then only the base model writes."), in: app)
    }

    @MainActor func testRuns() {
        let app = launched()
        showRecordedRun(in: app)
        show("Runs", in: app)
        see(app.navigationBars["Runs"])
        let run = see(app.saying("Recorded run"))
        keep(app, as: "Runs")
        run.tap()
        see(app.navigationBars["Recorded run"])
        see(app.buttons["Share Log and Adapters"])
        see(app.buttons["Delete Run"])
        reach(app.identified("loss-chart"), in: app)
        keep(app, as: "A run of the list")
    }

    @MainActor func testModels() {
        let app = launched(at: "Models")
        see(app.navigationBars["Models"])
        see(app.saying("Demo"))
        see(app.buttons["Add a Model"])
        keep(app, as: "Models")
        XCTAssertFalse(reach(app.buttons["Look It Up"], in: app).isEnabled, "there is no name to look up")
        XCTAssertFalse(reach(app.buttons["Check This Phone"], in: app).isEnabled, "there is no GPU to check")
    }

    @MainActor func testCompare() {
        let app = launched(at: "Compare")
        see(app.navigationBars["Compare"])
        XCTAssertFalse(see(app.buttons["Measure on a File"]).isEnabled, "no model runs here")
        keep(app, as: "Compare")
        XCTAssertFalse(reach(app.buttons["Measure"], in: app).isEnabled, "nothing can be trained here")
    }

    // MARK: - Ways through the app

    @MainActor private func launched(at tab: String = "Train") -> XCUIApplication {
        let app = XCUIApplication()
        app.launch()
        show(tab, in: app)
        return app
    }

    @MainActor private func show(_ tab: String, in app: XCUIApplication) { see(app.tabBars.buttons[tab]).tap() }

    @MainActor private func showRecordedRun(in app: XCUIApplication) {
        see(app.buttons["Show a Recorded Run"]).tap()
        see(app.saying("Finished, adapters saved"))
    }

    @MainActor @discardableResult private func see(
        _ element: XCUIElement, file: StaticString = #filePath, line: UInt = #line
    ) -> XCUIElement {
        XCTAssertTrue(
            element.waitForExistence(timeout: Self.patience), "\(element) is not there", file: file, line: line)
        return element
    }

    /// Scrolls down until the element exists, at most ten times. A list contains only its visible elements.
    @MainActor @discardableResult private func reach(
        _ element: XCUIElement, in app: XCUIApplication, file: StaticString = #filePath, line: UInt = #line
    ) -> XCUIElement {
        for _ in 0..<10 where !element.exists { app.swipeUp() }
        XCTAssertTrue(element.exists, "\(element) is nowhere on the screen", file: file, line: line)
        return element
    }

    @MainActor private func keep(_ app: XCUIApplication, as name: String) {
        attach(XCTAttachment(screenshot: app.screenshot()), as: name)
        attach(XCTAttachment(string: app.debugDescription), as: "\(name), elements")
        var findings: [String] = []
        do {
            try app.performAccessibilityAudit { issue in
                findings.append("\(issue.detailedDescription) \(issue.element?.description ?? "")")
                return true  // findings do not fail the test
            }
        } catch {
            findings.append("The audit ended: \(error)")
        }
        attach(XCTAttachment(string: findings.joined(separator: "\n")), as: "\(name), audit")
    }

    @MainActor private func attach(_ attachment: XCTAttachment, as name: String) {
        attachment.name = name
        attachment.lifetime = .keepAlways
        add(attachment)
    }
}

@MainActor extension XCUIApplication {
    fileprivate func saying(_ words: String) -> XCUIElement {
        descendants(matching: .any).matching(NSPredicate(format: "label BEGINSWITH %@", words)).firstMatch
    }

    fileprivate func identified(_ identifier: String) -> XCUIElement {
        descendants(matching: .any).matching(identifier: identifier).firstMatch
    }
}
