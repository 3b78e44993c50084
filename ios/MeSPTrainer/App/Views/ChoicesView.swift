import MeSPAppModel
import SwiftUI

struct ChoicesView: View {
    @Environment(AppModel.self) private var model

    private var list: [Choice] { model.choices.list }

    var body: some View {
        List {
            ForEach(list) { choice in
                HStack {
                    VStack(alignment: .leading, spacing: 4) {
                        Text(choice.prompt.last?.content ?? "").font(.callout)
                        Label(choice.chosen, systemImage: "hand.thumbsup")
                            .accessibilityLabel("Better: \(choice.chosen)")
                        Label(choice.rejected, systemImage: "hand.thumbsdown")
                            .foregroundStyle(.secondary)
                            .accessibilityLabel("Not so good: \(choice.rejected)")
                    }
                    Spacer()
                    RowMenu(name: choice.prompt.last?.content ?? "") { model.askToDelete(.choice(choice)) }
                }
            }
            .onDelete { rows in
                if let row = rows.first { model.askToDelete(.choice(list[row])) }
            }
        }
        .navigationTitle("Choices")
    }
}
