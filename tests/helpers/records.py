import json
from typing import Any

from mesp.data.chat_template import Rendering
from mesp.data.fields import Fields, refuse_unread
from mesp.data.loss_mask import Encoded, encode_conversation
from mesp.data.messages import Message, read_messages
from mesp.data.records import AnyRecord, Conversation, Labelled, Pair, Text


def messages_of(messages: list[dict[str, Any]]) -> list[Message]:
    return read_messages(Fields("A record", {"messages": messages}), "messages")


def encode(
    tokenizer: Any, conversation: Conversation, loss_on: str, split_special: bool = False
) -> Encoded:
    encoded = encode_conversation(Rendering(tokenizer, conversation, split_special), loss_on)
    refuse_unread([("It", encoded.unread)])
    return encoded


def content(record: AnyRecord) -> Any:
    match record:
        case Text():
            return record.text if record.is_file else {"text": record.text}
        case Conversation(texts=(prompt, completion)):
            return {"prompt": prompt, "completion": completion}
        case Conversation():
            return {"messages": record.messages}
        case Pair(chosen=chosen, rejected=rejected):
            return {"chosen": content(chosen), "rejected": content(rejected)}
        case Labelled(answer=answer, is_good=label):
            return content(answer) | {"label": label}


def as_json(records: list[AnyRecord]) -> list[str]:
    return [json.dumps(content(each)) for each in records]
