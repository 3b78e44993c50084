"""The settings of a training run, each declared once.

The options of the commands, `--config`, what a federation's server may set, and what may change
when a run is resumed derive from the declarations here. `Core/Run/RunSettings.swift` has the same
settings for the app, and checks them again; a test holds both together.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Self

from mesp.bundle.manifest import Manifest
from mesp.errors import MespError
from mesp.models.families import TRAINABLE

# The paper's update, and the engine's where a settings file names none.
PAPER: dict[str, Any] = {"optimizer": "sgd", "learning_rate": 1e-4}

METHODS = ("mesp", "mebp", "mezo")
OPTIMIZERS = ("sgd", "adamw8bit", "adamw")
ADAMW = ("adamw8bit", "adamw")  # with its moments in 8 bits, and in float32
OBJECTIVES = ("dpo", "ipo", "simpo", "orpo", "kto")
PREFERRED_SEQ_LEN = 256
GROUP_SIZE = 8  # of sampled answers
MAX_SEQUENCES = 1 << 16  # of a step


@dataclass(frozen=True)
class Setting:
    """The declaration of a setting besides its name and its default."""

    kind: type  # int, float, bool, str, list (some of `choices`), dict (of numbers) or Path
    help: str = ""
    least: float | None = None
    above: float | None = None
    most: float | None = None
    below: float | None = None
    choices: tuple[str, ...] | None = None
    default_text: str | None = None  # of a default that is None
    key: str = ""  # in settings.json, where that is not the name
    metavar: str | None = None
    federated: bool = False  # whether the server of a federation may set it
    may_change: bool = False  # when a run is resumed: no result depends on it
    can_be_refused: bool = False  # whether there is an option with --no- too
    only_with: tuple[str, tuple[str, ...]] | None = None  # a setting, and values, that it needs

    def problem(self, value: Any) -> str | None:
        """The requirement that a value does not meet, as the end of a sentence, or None."""
        if self.kind is list:
            choices = self.choices or ()
            names = value if isinstance(value, list) else [None]
            is_some = all(name in choices for name in names)
            return None if is_some else f"a list of some of {', '.join(choices)}"
        if self.choices is not None:
            return None if value in self.choices else f"one of {', '.join(self.choices)}"
        if self.kind is bool:
            return None if isinstance(value, bool) else "true or false"
        if self.kind in (str, Path):
            return None if isinstance(value, str) else "a text"
        if self.kind is dict:
            are_numbers = isinstance(value, dict) and all(
                type(each) in (int, float) and is_held(each) for each in value.values()
            )
            return None if are_numbers else "an object of numbers"
        noun = "a whole number" if self.kind is int else "a finite number"
        kinds = (int,) if self.kind is int else (int, float)
        if type(value) not in kinds:
            return noun
        if not is_held(value):
            return noun + " of 64 bits" if self.kind is int else noun + " of 32 bits"
        if self.least is not None and value < self.least:
            return f"{noun} at least {self.least:g}"
        if self.above is not None and value <= self.above:
            return f"{noun} above {self.above:g}"
        if self.most is not None and value > self.most:
            return f"{noun} at most {self.most:g}"
        if self.below is not None and value >= self.below:
            return f"{noun} below {self.below:g}"
        return None


def is_held(value: object) -> bool:
    """Whether mesp-engine has room for a value: a whole number of 64 bits, or a finite one of 32,
    where it is not too small."""
    if type(value) is int:
        return abs(value) < 1 << 63
    try:
        rounded = struct.unpack("<f", struct.pack("<f", value))[0]
    except (OverflowError, struct.error):
        return False
    return math.isfinite(rounded) and bool(rounded) == bool(value)


def setting(kind: type, default: Any, help: str = "", **others: Any) -> Any:
    """A field of a dataclass of settings."""
    return field(default=default, metadata={"setting": Setting(kind, help, **others)})


def settings_of(kind: type[Settings]) -> dict[str, Setting]:
    """The settings that a dataclass declares, by name."""
    return {each.name: each.metadata["setting"] for each in fields(kind)}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings that are declared as fields."""

    def __post_init__(self) -> None:
        """Raises MespError where a value is not one that the setting can have."""
        for each in fields(self):
            value, declared = getattr(self, each.name), each.metadata["setting"]
            if value is None and each.default is None:
                continue
            if problem := declared.problem(value):
                raise MespError(f"{each.name} is {value!r:.200}, and must be {problem}.")

    @classmethod
    def from_json(cls, entries: Mapping[str, Any]) -> Self:
        """The settings in the object of a `settings.json`; those that it lacks, as a file of an
        older version does, have their defaults. Raises TypeError or MespError if invalid."""
        keys = {declared.key or name: name for name, declared in settings_of(cls).items()}
        return cls(**{name: entries[key] for key, name in keys.items() if key in entries})

    def to_json(self) -> dict[str, Any]:
        """By their keys in `settings.json`."""
        return {
            declared.key or name: getattr(self, name)
            for name, declared in settings_of(type(self)).items()
        }


@dataclass(frozen=True, kw_only=True)
class TrainSettings(Settings):
    """The settings of a run, which depends on nothing else besides its bundle.

    What is None where that is not a value goes by the bundle: `completed` fills it in.
    """

    steps: int = setting(
        int, MISSING, "Updates of the adapters.", least=1, federated=True, may_change=True
    )
    method: str = setting(
        str, "mesp", "The method that computes gradients.", choices=METHODS, federated=True
    )  # fmt: skip
    seq_len: int | None = setting(
        int, None, "Tokens a sequence.", least=1, federated=True,
        default_text="256 or the bundle's longest",
    )  # fmt: skip
    batch_size: int = setting(
        int, 1, "Sequences of a batch.", least=1, federated=True
    )  # fmt: skip
    grad_accumulation_steps: int = setting(
        int,
        1,
        "Batches of an update, which is the mean over the targets of all of them.",
        least=1,
        federated=True,
    )
    seed: int = setting(
        int, 0, "Seed of the initial adapters and the order of the data.", least=0, most=2**31 - 1,
        federated=True,
    )  # fmt: skip
    rank: int | None = setting(
        int, None, "LoRA rank.", least=1, federated=True, default_text="the bundle's first"
    )
    alpha: float = setting(
        float, 16.0, "Scale the adapters by alpha / rank.", above=0, federated=True
    )  # fmt: skip
    rslora: bool = setting(bool, False, "Scale the adapters by alpha / √rank.", federated=True)
    projections: list[str] | None = setting(  # noqa: RUF009, as the others, a field
        list, None,
        "Linear layers to train, as in q,v or, where q, k and v are one, qkv; experts are a "
        "mixture's.",
        choices=TRAINABLE, federated=True, default_text="all but experts",
    )  # fmt: skip
    num_layers: int | None = setting(
        int, None, "Train the last N blocks only.", least=1, federated=True, default_text="all"
    )
    lora_dtype: str = setting(
        str, "float32",
        "Type of the adapters; bfloat16 takes half the memory and rounds stochastically.",
        choices=("float32", "bfloat16"), federated=True,
    )  # fmt: skip
    freeze_a: bool = setting(
        bool,
        False,
        "Train each B only, and freeze A (FFA-LoRA).",
        federated=True,
        can_be_refused=True,
    )
    adapters: str | None = setting(
        Path, None, "Start from the adapters in this folder, in mlx-lm's or PEFT's format."
    )
    objective: str | None = setting(
        str, None,
        "Objective on preference data: dpo, ipo, simpo or orpo on pairs, kto on single answers.",
        choices=OBJECTIVES,
    )  # fmt: skip
    beta: float | None = setting(
        float, None, "β, the scale of an objective's rewards, or ipo's τ.", above=0,
        only_with=("objective", OBJECTIVES), default_text="0.1",
    )  # fmt: skip
    gamma: float | None = setting(
        float, None, "γ, simpo's margin.", least=0,
        only_with=("objective", ("simpo",)), default_text="0.5",
    )  # fmt: skip
    desirable_weight: float | None = setting(
        float, None, "Weight of kto's good answers.", above=0,
        only_with=("objective", ("kto",)), default_text="1",
    )  # fmt: skip
    undesirable_weight: float | None = setting(
        float, None, "Weight of kto's bad answers.", above=0,
        only_with=("objective", ("kto",)), default_text="1",
    )  # fmt: skip
    reward: str | None = setting(
        str, None,
        "Sample answers and learn from their rewards (GRPO): exact, json, json-equal, "
        "regex:PATTERN, length:N, or a function of yours, module:function.",
    )  # fmt: skip
    group_size: int | None = setting(
        int, None, "Answers that are sampled to each prompt.", least=2, most=1024,
        default_text="8 with --reward",
    )  # fmt: skip
    max_tokens: int = setting(int, 128, "Of a sampled answer.", least=1, most=10**6)
    dr_grpo: bool = setting(
        bool, False,
        "Leave out GRPO's divisions by the rewards' deviation and an answer's length (Dr. GRPO).",
    )  # fmt: skip
    optimizer: str | None = setting(
        str, None,
        "adamw keeps 8 bytes a parameter of the adapters, adamw8bit 2, sgd none.",
        choices=OPTIMIZERS, federated=True, default_text="adamw8bit; of mezo sgd",
    )  # fmt: skip
    learning_rate: float | None = setting(
        float, None, "Learning rate, before the schedule.", above=0, federated=True,
        default_text="of AdamW 0.007 / √hidden size, of SGD 0.1, a tenth of these with an "
        "objective, a third with a reward; of mezo 1e-4",
    )  # fmt: skip
    momentum: float = setting(
        float,
        0.0,
        "Momentum of SGD.",
        least=0,
        below=1,
        federated=True,
        only_with=("optimizer", ("sgd",)),
    )
    beta1: float = setting(
        float, 0.9, "AdamW's β₁.", least=0, below=1, federated=True, only_with=("optimizer", ADAMW)
    )
    beta2: float = setting(
        float,
        0.999,
        "AdamW's β₂.",
        least=0,
        below=1,
        federated=True,
        only_with=("optimizer", ADAMW),
    )
    epsilon: float = setting(
        float, 1e-8, "AdamW's ε.", above=0, federated=True, only_with=("optimizer", ADAMW)
    )
    weight_decay: float = setting(float, 0.0, "Weight decay.", least=0, federated=True)
    schedule: str = setting(
        str, "constant", "Decay of the learning rate to zero after the warm-up.",
        choices=("constant", "linear", "cosine"), federated=True,
    )  # fmt: skip
    warmup: int = setting(
        int, 0, "Steps over which the learning rate rises from zero.", least=0, federated=True
    )
    max_grad_norm: float | None = setting(
        float, None, "Clip gradients to this norm over all blocks.", above=0, federated=True
    )
    skip_bad_steps: bool = setting(
        bool, False,
        "Undo a step whose loss or gradient is not finite, and continue; keeps the parameters "
        "twice.",
        federated=True,
    )  # fmt: skip
    mezo_epsilon: float = setting(
        float, 1e-3, "Size of MeZO's perturbation.", above=0, federated=True,
        only_with=("method", ("mezo",)),
    )  # fmt: skip
    dp_clip: float | None = setting(
        float, None,
        "Differential privacy (DP-SGD): clip each example's gradient to this norm; a step draws "
        "--batch-size examples in the mean.",
        above=0,
    )  # fmt: skip
    dp_noise: float | None = setting(
        float, None,
        "Standard deviation of the noise on their sum, as a multiple of --dp-clip.", least=0,
    )  # fmt: skip
    dp_delta: float = setting(
        float, 1e-5, "δ at which ε is reported; well below 1 / examples.", above=0, below=1,
        may_change=True,
    )  # fmt: skip
    val_batches: int = setting(int, 25, "Held-out sequences of an evaluation.", least=0)
    eval_every: int = setting(
        int, 0, "Steps between evaluations, of which the best is kept; 0: before and after.",
        least=0,
    )  # fmt: skip
    early_stopping: int = setting(
        int, 0, "End after this many evaluations without a better one; 0: never.", least=0
    )
    test: bool = setting(bool, False, "Evaluate on the test data at the end.")
    replay: float | None = setting(
        float, None,
        "Share of the sequences that are replayed, so that less is forgotten: texts that the model "
        "writes before the run, or --replay-data.",
        above=0, below=1, key="replay_share", metavar="SHARE",
    )  # fmt: skip
    replay_data: str | None = setting(
        str, None, "Older records to replay, as mesp-export takes --data.",
        key="replay_text", metavar="FILE|DIR|NAME", default_text="the model's own texts",
    )  # fmt: skip
    max_forgetting: float | None = setting(
        float, None,
        "Most that perplexity on general text may rise, in percent: at the end the adapters are "
        "weakened to that, or none are kept.",
        least=0, metavar="PERCENT",
    )  # fmt: skip
    general: str | None = setting(
        str, None,
        "UTF-8 text for --max-forgetting, in the model's language and not about the task.",
        key="general_text", metavar="FILE", default_text="a page of English that comes with MeSP",
    )  # fmt: skip
    save_every: int = setting(
        int, 100,
        "Steps between saves, beside one after a minute and then every three; 0: at the end only.",
        least=0, may_change=True,
    )  # fmt: skip
    memory_limit: float | None = setting(
        float, None,
        "Peak footprint to stay below, in 10⁶ bytes; room to spare is used for speed.",
        above=0, key="memory_limit_mb", metavar="MB", federated=True, may_change=True,
    )  # fmt: skip
    offload: str | None = setting(
        str, None, "Keep block inputs, or the optimizer's state too, in a file on disk.",
        choices=("none", "inputs", "all"), federated=True, may_change=True,
        default_text="what the limit asks for",
    )  # fmt: skip

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> TrainSettings:
        """The settings by these names. Raises MespError where one is unknown, or there are no
        `steps`."""
        known = [each.name for each in fields(cls)]
        if unknown := [name for name in given if name not in known]:
            raise MespError(f"There is no setting {unknown[0]}; there are {', '.join(known)}.")
        if given.get("steps") is None:
            raise MespError("Set the number of steps: steps=N.")
        return cls(**given)

    def completed(self, manifest: Manifest, paper: bool = False) -> TrainSettings:
        """With what goes by the bundle filled in: the sequence length, the rank and the update,
        the `paper`'s or the default.

        Raises MespError where the bundle cannot serve it, or `paper` and another update are given.
        """
        update = PAPER if paper else {}
        for name, value in update.items():
            if getattr(self, name) not in (None, value):
                raise MespError(
                    f"--paper has {flag(name)} {value}, not {getattr(self, name)}: "
                    "leave out one of them."
                )
        optimizer = update.get("optimizer", self.optimizer) or default_optimizer(self.method)
        rate = update.get("learning_rate", self.learning_rate) or default_learning_rate(
            self.method,
            optimizer,
            manifest.architecture.hidden_size,
            self.objective,
            self.reward is not None,
        )
        lengths, ranks = manifest.seq_lens, manifest.ranks
        return replace(
            self,
            seq_len=_choose(lengths, self.seq_len, "sequence length", PREFERRED_SEQ_LEN),
            rank=_choose(ranks, self.rank, "rank", ranks[0]),
            optimizer=optimizer,
            learning_rate=rate,
            group_size=self.group_size or (GROUP_SIZE if self.reward else None),
        )

    def check(self, manifest: Manifest) -> None:
        """Raises MespError where settings do not go together, have no use, or the bundle cannot
        serve them."""
        self.check_use(manifest)
        self._check_goal(manifest)
        self._check_privacy()
        self._check_reward(manifest)
        self._check_forgetting(manifest)

    def check_use(self, manifest: Manifest) -> None:
        """Raises MespError where a setting of the update or the adapters has no use, or the model
        cannot serve it."""
        for each in fields(self):
            needs = each.metadata["setting"].only_with
            # A default is not a request, even where a settings.json that is a --config has it.
            if needs and getattr(self, each.name) != each.default:
                other, values = needs
                if getattr(self, other) not in values:
                    raise MespError(
                        f"{flag(each.name)} has no use without {flag(other)} "
                        f"{' or '.join(values)}: leave it out."
                    )
        size = self.batch_size * self.grad_accumulation_steps * (self.group_size or 1)
        if size > MAX_SEQUENCES:
            raise MespError(
                f"A step of {size:,} sequences is too large: at most {MAX_SEQUENCES:,}."
            )
        if self.warmup >= self.steps:
            raise MespError(f"--warmup {self.warmup} does not end within --steps {self.steps}.")
        arch = manifest.architecture
        for name in self.projections or ():
            if name not in arch.trainable:
                raise MespError(
                    f"--projections {name} is not in the model's blocks; "
                    f"they have {', '.join(arch.trainable)}."
                )
        layers = arch.num_hidden_layers
        if (self.num_layers or 1) > layers:
            raise MespError(f"--num-layers {self.num_layers} is more than the {layers} blocks.")

    def _check_goal(self, manifest: Manifest) -> None:
        if self.objective == "kto" and self.batch_size < 2:
            raise MespError(
                "--objective kto takes each prompt with the answer of another record of the batch: "
                "set --batch-size to 2 or more."
            )
        self._check_labels(manifest)
        if self.eval_every and not (self.val_batches and "valid" in manifest.data):
            raise MespError(
                "--eval-every needs evaluations: --val-batches above 0, and a bundle with held-out "
                "data."
            )
        if self.early_stopping and not self.eval_every:
            raise MespError(
                "--early-stopping needs evaluations on the way: --eval-every and --val-batches "
                "above 0, and a bundle with held-out data."
            )
        if self.test and "test" not in manifest.data:
            raise MespError("--test needs test data, and the bundle has none: export it with some.")

    def _check_labels(self, manifest: Manifest) -> None:
        """Refuses data without preferences for an objective, and preference data without one."""
        train = manifest.data.get("train")
        if train is None or (train.labels is not None) == (self.objective is not None):
            return
        if self.objective is None:
            raise MespError(
                "The bundle's data is preference data: choose an --objective for "
                "them, or give it other data with mesp data."
            )
        kto = self.objective == "kto"
        answers = '"completion" and "label"' if kto else '"chosen" and "rejected"'
        raise MespError(
            f'--objective {self.objective} needs records of a "prompt", {answers}, and the bundle '
            "has others: give it some with mesp data."
        )

    def _check_reward(self, manifest: Manifest) -> None:
        """Refuses what does not go together with rewards, and their settings without them."""
        if self.reward is None:
            for name in ("group_size", "max_tokens", "dr_grpo"):
                (default,) = [each.default for each in fields(self) if each.name == name]
                if getattr(self, name) != default:
                    raise MespError(f"{flag(name)} has no use without --reward: leave it out.")
            return
        refused = {
            "--method mezo": self.method == "mezo",
            f"--objective {self.objective}": self.objective is not None,
            "--dp-clip": self.dp_clip is not None,
        }
        _refuse_beside("--reward", refused)
        train = manifest.data.get("train")
        if train is None:
            return
        if train.mask is None:
            raise MespError(
                "--reward needs records of a prompt and an answer, and all tokens of the bundle's "
                "are in the loss: give it some with mesp data."
            )
        if train.pack:
            raise MespError(
                "--reward needs a record a sequence, and the bundle's data has several: write it "
                "with mesp data --no-pack."
            )

    def _check_forgetting(self, manifest: Manifest) -> None:
        """Refuses replay where sequences are not what is trained on, and a choice of the adapters'
        strength where nothing is held out to choose by."""
        if self.replay is None and self.replay_data is not None:
            raise MespError("--replay-data has no use without --replay: say which share.")
        refused = {
            f"--objective {self.objective}": self.objective is not None,
            "--reward": self.reward is not None,
        }
        if self.replay is not None:
            _refuse_beside("--replay", refused | {"--dp-clip": self.dp_clip is not None})
        if self.max_forgetting is None:
            if self.general is not None:
                raise MespError("--general has no use without --max-forgetting: leave it out.")
            return
        # Their loss on the data's answers says little about what they learn.
        for typed, is_given in refused.items():
            _refuse_beside(typed, {"--max-forgetting": is_given})
        if not self.val_batches or "valid" not in manifest.data:
            raise MespError(
                "--max-forgetting needs evaluations: --val-batches above 0, and a bundle with "
                "held-out data."
            )

    def _check_privacy(self) -> None:
        """Refuses what does not go together with DP-SGD."""
        if self.dp_clip is None and self.dp_noise is None:
            return
        if self.dp_clip is None or self.dp_noise is None:
            raise MespError(
                "--dp-clip and --dp-noise go together: give both, with --dp-noise 0 for no noise."
            )
        refused = {
            "--method mezo": self.method == "mezo",
            "--objective kto": self.objective == "kto",
            f"--max-grad-norm {self.max_grad_norm}": self.max_grad_norm is not None,
            "--skip-bad-steps": self.skip_bad_steps,
        }
        _refuse_beside("--dp-clip", refused)
        if self.grad_accumulation_steps > 1:
            raise MespError(
                "--dp-clip takes one batch a step: leave out --grad-accumulation-steps, and set "
                "--batch-size to the examples of a step."
            )


def _refuse_beside(option: str, others: Mapping[str, bool]) -> None:
    """Raises MespError where one of the `others` is given: those that do not go together with
    `option`."""
    for typed, is_given in others.items():
        if is_given:
            raise MespError(f"{typed} does not go together with {option}: leave out one of them.")


def flag(name: str) -> str:
    """The option of a setting, as in `--seq-len`."""
    return "--" + name.replace("_", "-")


def kept(before: object, given: Mapping[str, Any], declared: Mapping[str, Setting]) -> None:
    """Raises MespError where what is `given` would change a resumed run."""
    for name, value in given.items():
        was = getattr(before, name)
        if not declared[name].may_change and value != was:
            raise MespError(
                f"A resumed run keeps its settings: {flag(name)} is "
                f"{'not set' if was is None else was} and cannot become {value}."
            )


def _choose(available: Iterable[int], wanted: int | None, what: str, preferred: int) -> int:
    """The value asked for, if the bundle has it; by default the preferred one or the largest."""
    if wanted is None:
        return preferred if preferred in available else max(available)
    if wanted not in available:
        listed = ", ".join(str(value) for value in available)
        raise MespError(f"The bundle has no {what} {wanted}; it was exported for {listed}.")
    return wanted


def default_optimizer(method: str) -> str:
    """The optimizer of a run that names none: docs/decisions.md says why."""
    return "sgd" if method == "mezo" else "adamw8bit"


def default_learning_rate(
    method: str,
    optimizer: str,
    hidden_size: int,
    objective: str | None = None,
    is_rewarded: bool = False,
) -> float:
    """0.007 / √hidden_size for AdamW: 5.1e-4 for the demo model, 2.3e-4 for Qwen2.5-0.5B; a tenth
    of it with an objective, a third with a reward."""
    if method == "mezo":
        return float(PAPER["learning_rate"])
    rate = 0.007 / math.sqrt(hidden_size) if optimizer in ADAMW else 0.1
    return rate / 10 if objective else rate / 3 if is_rewarded else rate
