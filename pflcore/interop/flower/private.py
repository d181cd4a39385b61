"""A client mod: some tensors of the model stay with their client, in any ClientApp, whatever the
server does."""

from __future__ import annotations

from fnmatch import fnmatchcase

from flwr.app import ArrayRecord, Context, Message, MessageType, RecordDict
from flwr.clientapp.typing import ClientAppCallable, Mod

from pflcore.check import are_names, refuse
from pflcore.interop.flower.records import only_record

PRIVATE = "pflcore.private"  # the record of Context.state


def keep_private(*patterns: str) -> Mod:
    """`ClientApp(mods=[keep_private("head.*")])`: the tensors that match stay with their client;
    nothing else changes, on neither side.

    The classifier's names make FedPer (Arivazhagan et al. 2019), the features' LG-FedAvg (Liang et
    al. 2020), the batch norms' FedBN (Li et al. 2021), of any app whose replies are models. A
    client's values are in `Context.state`; they take the place of the incoming ones in training and
    evaluation. In their place the reply carries the values that came: private ones do not travel,
    every reply has the tensors that the server expects, and its mean leaves them where they
    started. Who has not trained yet uses those. ValueError in one sentence where a pattern matches
    nothing, or the model is another than the one that was kept.
    """
    if not patterns:
        raise ValueError(
            "patterns: expected the names of the private tensors, as in keep_private('head.*'), "
            "got none."
        )
    if not are_names(patterns):
        refuse("patterns", "a name or a list of names", patterns)

    def mod(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        kind = message.metadata.message_type.partition(".")[0]
        if kind == MessageType.QUERY:
            return call_next(message, context)
        key, came = only_record(message, "the server's message")
        names = [n for n in came if any(fnmatchcase(n, p) for p in patterns)]
        for p in patterns:
            if not any(fnmatchcase(n, p) for n in names):
                raise ValueError(
                    f"keep_private: {p!r} matches no tensor of the model; its tensors are "
                    f"{', '.join(came)}."
                )
        kept = context.state.array_records.get(PRIVATE, {})
        for n in kept:
            if n not in names or kept[n].shape != came[n].shape:
                got = f"shape {list(came[n].shape)}" if n in came else "none"
                raise ValueError(
                    f"keep_private: this client keeps {n!r} of shape {list(kept[n].shape)}, the "
                    f"server sends {got}."
                )
        message.content = RecordDict({**message.content, key: ArrayRecord({**came, **kept})})
        reply = call_next(message, context)
        if kind == MessageType.TRAIN and reply.has_content():
            key, made = only_record(reply, "the app's reply")
            missing = [n for n in names if n not in made]
            if missing:
                raise ValueError(
                    f"keep_private: the app's reply is without {', '.join(map(repr, missing))}; it "
                    "must send the whole model."
                )
            context.state[PRIVATE] = ArrayRecord({n: made[n] for n in names})
            reply.content = RecordDict(
                {**reply.content, key: ArrayRecord({**made, **{n: came[n] for n in names}})}
            )
        return reply

    return mod
