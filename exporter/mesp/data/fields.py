"""The columns of a record: those that a kind reads, and those that are left."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from mesp.errors import MespError

OPTIONS = "chat_template_kwargs"  # TRL's key for chat template options
# The keys of a record that --columns can name columns for.
KEYS = ("text", "prompt", "completion", "messages", "tools", "chosen", "rejected", "label")
# Names of columns and keys, in lower case and with _ for -, that no public data set uses for what a
# model reads or writes.
NEVER_CONTENT = (
    "__index_level_0__", "_id", "added_at", "avg_rating", "batch_id", "categories", "category",
    "chosen_avg_rating", "chosen_model", "chosen_rating", "chosen_score", "chosen_source",
    "conv_id", "conversation_hash", "conversation_id", "created", "created_at", "created_date",
    "created_utc", "custom_id", "data_source", "dataset", "dataset_name", "dataset_source",
    "date", "deleted", "dialog_id", "dialogue_id", "difficulty", "doc_id", "domain",
    "example_id", "fold", "generator", "generator_name", "guid", "hash", "hashed_ip", "id",
    "idx", "index", "item_id", "lang", "language", "languages", "level", "license", "line_id",
    "margin", "message_id", "message_tree_id", "meta", "metadata", "model", "model_name",
    "n_tokens", "num_tokens", "num_turns", "origin", "original_dataset", "original_id",
    "original_source", "parent_id", "parent_message_id", "partition", "prompt_id", "qid",
    "quality", "quality_score", "question_id", "quiz_id", "rank", "rating", "ratings",
    "record_id", "redacted", "rejected_avg_rating", "rejected_model", "rejected_rating",
    "rejected_score", "rejected_source", "review_count", "review_result", "row_id", "sample_id",
    "score", "score_chosen", "score_rejected", "scores", "session_id", "source",
    "source_dataset", "source_id", "source_name", "sources", "split", "subcategory", "subset",
    "synthetic", "tag", "tags", "task_id", "task_name", "task_type", "text_id", "thread_id",
    "timestamp", "timestamps", "token_count", "topic", "toxic", "toxicity", "tree_id",
    "tree_state", "turn", "type", "uid", "updated_at", "updated_date", "url", "urls", "user_id",
    "uuid", "version", "word_count",
)  # fmt: skip


def is_empty(value: Any) -> bool:
    """Returns whether a value says nothing: null, or an empty text, list or object."""
    return value is None or (isinstance(value, str | list | dict) and not value)


def refuse_unread(places: Iterable[tuple[str, Iterable[str]]]) -> None:
    """Raises MespError if a record has columns or keys that nothing reads and that may be content.

    `places` has each record's place, and the names. The message has the names of all records.
    """
    found: dict[str, list[str]] = {}
    for where, unread in places:
        if names := [n for n in unread if n.lower().replace("-", "_") not in NEVER_CONTENT]:
            found.setdefault(where, []).extend(names)
    if not found:
        return
    where, first = next(iter(found.items()))
    names = [*dict.fromkeys(name for each in found.values() for name in each)]
    quoted = [f'"{name}"' for name in names]
    said = " and ".join([", ".join(quoted[:-1]), quoted[-1]] if quoted[1:] else quoted)
    have = f"{where} has" if {*first} == {*names} else f"{where} and records after it have"
    text, them = ("its text", "it") if len(names) == 1 else ("their text", "them")
    raise MespError(
        f"{have} {said}, which nothing reads: write {text} into what is read, or leave {them} out "
        f"with --ignore {','.join(names)}."
    )


class Fields:
    """A record's columns, under the keys that --columns gives them. A kind takes what it reads.

    Null counts as absent. `unread` collects the names of the message's keys that nothing reads.
    Raises MespError if one of `columns` is not there.
    """

    def __init__(
        self,
        where: str,
        record: Mapping[str, Any],
        columns: Mapping[str, str] | None = None,
        ignored: tuple[str, ...] = (),
    ) -> None:
        columns = columns or {}
        for column in columns.values():
            if column not in record:
                raise MespError(
                    f"{where} has no column {column}, which --columns names; it has "
                    f"{', '.join(record) or 'none'}."
                )
        renamed = {key: record[column] for key, column in columns.items()}
        moved = {*columns.values()} - {*columns}
        self.where, self.ignored = where, ignored
        self.values = {
            key: value
            for key, value in {**record, **renamed}.items()
            if key not in ignored and key not in moved
        }
        self.names = [*self.values]
        self.unread: list[str] = []

    def has(self, *keys: str) -> bool:
        """Returns whether each of the columns has a value."""
        return all(self.values.get(key) is not None for key in keys)

    def take(self, key: str) -> Any:
        """Returns and removes a column's value, or None."""
        return self.values.pop(key, None)

    def take_text(self, key: str) -> str:
        """Returns and removes a column's text. Raises MespError if it is not a string."""
        value = self.take(key)
        if not isinstance(value, str):
            raise MespError(f'{self.where} has a "{key}" that is not a string: write it as one.')
        return value

    def left(self) -> tuple[str, ...]:
        """Returns the names of what has a value and was not taken."""
        return (*(key for key, value in self.values.items() if not is_empty(value)), *self.unread)
