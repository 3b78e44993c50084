import MeSPAppModel
import MeSPCore
import SwiftUI

/// The answers that the person took, each with the one that it was taken over.
struct ChoicesView: View {
    @Environment(AppModel.self) private var model

    private var list: [Choice] { model.choices.list }

    var body: some View {
        List {
            ForEach(list) { choice in
                VStack(alignment: .leading, spacing: 4) {
                    Text(choice.prompt.last?.content ?? "").font(.callout)
                    Label(choice.chosen, systemImage: "hand.thumbsup").accessibilityLabel("Better: \(choice.chosen)")
                    Label(choice.rejected, systemImage: "hand.thumbsdown")
                        .foregroundStyle(.secondary)
                        .accessibilityLabel("Not so good: \(choice.rejected)")
                }
            }
            .onDelete { places in
                let ids = Set(places.map { list[$0].id })
                Task { await model.deleteChoices(ids) }
            }
        }
        .navigationTitle("Choices")
    }
}
