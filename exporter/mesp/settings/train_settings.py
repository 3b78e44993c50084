from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields, replace
from pathlib import Path
from typing import Any

from mesp.bundle.manifest import Manifest
from mesp.errors import MespError
from mesp.models.families import TRAINABLE
from mesp.settings.declaration import Settings, name_option, setting
from mesp.settings.optimizer_defaults import ADAMW, PAPER, choose_learning_rate, choose_optimizer

METHODS = {
    "mesp": "The structured backward pass, written by hand.",
    "mebp": "The same loop over blocks, with gradients from automatic differentiation.",
    "mezo": "Zeroth order: two forward passes with a seeded perturbation.",
}
OPTIMIZERS = {
    "sgd": "Stochastic gradient descent.",
    "adamw8bit": "AdamW with its moments in 8 bits.",
    "adamw": "AdamW with its moments in float32.",
}
OBJECTIVES = {
    "dpo": "Direct preference optimization, of a chosen and a rejected answer to a prompt.",
    "ipo": "Identity preference optimization, of such pairs.",
    "simpo": "Simple preference optimization, of such pairs.",
    "orpo": "Odds ratio preference optimization, of such pairs.",
    "kto": "Kahneman-Tversky optimization, on single answers that are good or bad.",
}
SCHEDULES = {
    "constant": "The learning rate stays.",
    "linear": "It falls linearly to zero.",
    "cosine": "It falls to zero as half a cosine.",
}
LORA_DTYPES = {"float32": "", "bfloat16": "Updates are rounded stochastically."}
OFFLOADS = {
    "none": "No array.",
    "inputs": "The block inputs, from the forward to the backward pass.",
    "all": "Also the adapters' parameters, the optimizer's state and sums of gradients.",
}
PREFERRED_SEQ_LEN = 256
GROUP_SIZE = 8
MAX_STEPS = 10**6  # maximum number of steps; products with it do not overflow
MAX_SEQUENCES = 1 << 16


@dataclass(frozen=True, kw_only=True)
class TrainSettings(Settings):
    """The settings of a training run.

    `complete` fills in the settings whose default depends on the bundle or on other settings.
    """

    steps: int = setting(
        int, MISSING, "Updates of the adapters.", least=1, most=MAX_STEPS, federated=True,
        may_change=True,
    )  # fmt: skip
    method: str = setting(
        str, "mesp", "The method that computes gradients.", choices=METHODS, federated=True
    )  # fmt: skip
    seq_len: int | None = setting(
        int, None, "Tokens a sequence.", least=1, federated=True,
        default_text="256 or the bundle's longest",
    )  # fmt: skip
    batch_size: int = setting(
        int, 1, "Sequences of a batch.", least=1, most=MAX_STEPS, federated=True
    )  # fmt: skip
    grad_accumulation_steps: int = setting(
        int, 1, "Batches of an update, which is the mean over the targets of all of them.",
        least=1, most=MAX_STEPS, federated=True,
    )  # fmt: skip
    seed: int = setting(
        int, 0, "Seed of the initial adapters and the order of the data.", least=0, most=2**31 - 1,
        federated=True,
    )  # fmt: skip
    rank: int | None = setting(
        int, None, "LoRA rank.", least=1, federated=True, default_text="the bundle's first"
    )
    alpha: float = setting(
        float, 16.0, "Numerator of the adapters' scale, alpha / rank.", above=0, federated=True
    )  # fmt: skip
    rslora: bool = setting(bool, False, "Scale the adapters by alpha / √rank.", federated=True)
    projections: list[str] | None = setting(  # noqa: RUF009, as the others, a field
        list, None,
        "Linear layers to train, as in q,v or, where q, k and v are one, qkv; experts are a "
        "mixture's.",
        choices=TRAINABLE, federated=True, default_text="all but experts",
    )  # fmt: skip
    num_layers: int | None = setting(
        int, None, "Number of blocks to train, the model's last.", least=1, federated=True,
        default_text="all",
    )  # fmt: skip
    blocks_per_step: float | None = setting(
        float, None,
        "Share of these blocks that an update trains; groups of neighbours take turns (after "
        "LCSB, arXiv:2602.13073).",
        above=0, below=1, federated=True, only_with=("method", ("mesp",)), default_text="all",
    )  # fmt: skip
    lora_dtype: str = setting(
        str, "float32",
        "Type of the adapters; bfloat16 takes half the memory and rounds stochastically.",
        choices=LORA_DTYPES, federated=True,
    )  # fmt: skip
    freeze_a: bool = setting(
        bool, False, "Train each B only, and freeze A (FFA-LoRA).", federated=True,
        can_be_refused=True,
    )  # fmt: skip
    dropout: float = setting(
        float, 0.0,
        "Probability that an input of an adapter is set to zero in training, drawn for each token "
        "(LoRA dropout).",
        least=0, below=1, federated=True, aliases=("--lora-dropout",),
    )  # fmt: skip
    dora: bool = setting(
        bool, False, "Train norm and direction of each output's weights separately (DoRA).",
        aliases=("--use-dora",),
    )  # fmt: skip
    adapters: str | None = setting(
        Path, None, "Folder of adapters to start from, in mlx-lm's or PEFT's format."
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
        only_with=("reward", None), default_text="8 with --reward",
    )  # fmt: skip
    max_tokens: int = setting(
        int, 128, "Maximum number of tokens of a sampled answer.", least=1, most=MAX_STEPS,
        only_with=("reward", None),
    )  # fmt: skip
    dr_grpo: bool = setting(
        bool, False,
        "Leave out GRPO's divisions by the rewards' deviation and an answer's length (Dr. GRPO).",
        only_with=("reward", None),
    )  # fmt: skip
    optimizer: str | None = setting(
        str, None,
        "Optimizer: adamw keeps 8 bytes a parameter of the adapters, adamw8bit 2, sgd none.",
        choices=OPTIMIZERS, federated=True, default_text="adamw8bit; of mezo sgd",
    )  # fmt: skip
    learning_rate: float | None = setting(
        float, None, "Learning rate, before the schedule.", above=0, federated=True,
        default_text="of AdamW 0.007 / √hidden size, of SGD 0.1, a tenth of these with an "
        "objective, a third with a reward; of mezo 1e-4",
    )  # fmt: skip
    loraplus_lr_ratio: float = setting(
        float, 1.0, "Learning rate of each B, and of DoRA's m, as a multiple of A's (LoRA+).",
        above=0, federated=True,
    )  # fmt: skip
    momentum: float = setting(
        float, 0.0, "Momentum of SGD.", least=0, below=1, federated=True,
        only_with=("optimizer", ("sgd",)),
    )  # fmt: skip
    beta1: float = setting(
        float, 0.9, "AdamW's β₁.", least=0, below=1, federated=True, only_with=("optimizer", ADAMW)
    )
    beta2: float = setting(
        float, 0.999, "AdamW's β₂.", least=0, below=1, federated=True,
        only_with=("optimizer", ADAMW),
    )  # fmt: skip
    epsilon: float = setting(
        float, 1e-8, "AdamW's ε.", above=0, federated=True, only_with=("optimizer", ADAMW)
    )
    weight_decay: float = setting(float, 0.0, "Weight decay.", least=0, federated=True)
    schedule: str = setting(
        str, "constant", "Decay of the learning rate to zero after the warm-up.",
        choices=SCHEDULES, federated=True,
    )  # fmt: skip
    warmup: int = setting(
        int, 0, "Steps over which the learning rate rises from zero.", least=0, federated=True
    )
    max_grad_norm: float | None = setting(
        float,
        None,
        "Norm over all blocks to which larger gradients are scaled down.",
        above=0,
        federated=True,
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
        "Differential privacy (DP-SGD): the norm that each example's gradient is clipped to; a "
        "step draws --batch-size examples in the mean.",
        above=0,
    )  # fmt: skip
    dp_noise: float | None = setting(
        float, None,
        "Standard deviation of the noise on their sum, as a multiple of --dp-clip.", least=0,
    )  # fmt: skip
    dp_delta: float = setting(
        float, 1e-5, "δ at which ε is reported; well below 1 / examples.", above=0, below=1,
        may_change=True, only_with=("dp_noise", None),
    )  # fmt: skip
    val_batches: int = setting(int, 25, "Held-out sequences of an evaluation.", least=0)
    eval_every: int = setting(
        int, 0, "Steps between evaluations; the best adapters are kept. 0: before and after.",
        least=0,
    )  # fmt: skip
    early_stopping: int = setting(
        int, 0, "Evaluations without improvement after which a run ends; 0: never.", least=0
    )
    test: bool = setting(bool, False, "Evaluate on the test data at the end.")
    replay: float | None = setting(
        float, None,
        "Share of the sequences that are replayed to reduce forgetting: texts that the model "
        "writes before the run, or --replay-data.",
        above=0, below=1, key="replay_share", metavar="SHARE",
    )  # fmt: skip
    replay_data: str | None = setting(
        str, None, "Older records to replay, as mesp-export takes --data.",
        key="replay_text", metavar="FILE|DIR|NAME", default_text="the model's own texts",
        only_with=("replay", None),
    )  # fmt: skip
    max_forgetting: float | None = setting(
        float, None,
        "Maximum rise of perplexity on general text, in percent: at the end the adapters are "
        "scaled down to that, or none are kept.",
        least=0, metavar="PERCENT",
    )  # fmt: skip
    general: str | None = setting(
        str, None,
        "UTF-8 text for --max-forgetting, in the model's language and not about the task.",
        key="general_text", metavar="FILE", default_text="a page of English that comes with MeSP",
        only_with=("max_forgetting", None),
    )  # fmt: skip
    save_every: int = setting(
        int, 100,
        "Steps between saves, besides one after a minute and then every three; 0: no others.",
        least=0, may_change=True,
    )  # fmt: skip
    memory_limit: float | None = setting(
        float, None,
        "Maximum peak footprint, in 10⁶ bytes; room below it is used for speed.",
        above=0, below=1e9, key="memory_limit_mb", metavar="MB", federated=True, may_change=True,
    )  # fmt: skip
    offload: str | None = setting(
        str, None, "The arrays kept in a file on disk: block inputs, or the optimizer's state too.",
        choices=OFFLOADS, federated=True, may_change=True,
        default_text="what the limit asks for",
    )  # fmt: skip
    device: str | None = setting(
        str, None, "The processor that computes: in bfloat16 on a GPU, in float32 on a CPU.",
        choices=("cpu", "gpu"), may_change=True, default_text="a GPU if MLX can use one",
    )  # fmt: skip

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> TrainSettings:
        """Raises MespError if a name is unknown, if a value is invalid, or if `steps` is
        missing.
        """
        known = [each.name for each in fields(cls)]
        if unknown := [name for name in given if name not in known]:
            raise MespError(f"There is no setting {unknown[0]}; there are {', '.join(known)}.")
        if given.get("steps") is None:
            raise MespError("Set the number of steps: steps=N, or epochs=N.")
        return cls(**given)

    def complete(self, manifest: Manifest, paper: bool = False) -> TrainSettings:
        """Returns the settings with the sequence length, rank, optimizer, learning rate and, with a
        reward, the group size filled in.

        Raises MespError if a setting contradicts `paper`.
        """
        update = PAPER if paper else {}
        for name, value in update.items():
            if getattr(self, name) not in (None, value):
                raise MespError(
                    f"--paper has {name_option(name)} {value}, not {getattr(self, name)}: "
                    "leave out one of them."
                )
        optimizer = update.get("optimizer", self.optimizer) or choose_optimizer(self.method)
        rate = update.get("learning_rate", self.learning_rate) or choose_learning_rate(
            self.method,
            optimizer,
            manifest.architecture.hidden_size,
            self.objective,
            self.reward is not None,
        )
        lengths = manifest.seq_lens
        preferred = PREFERRED_SEQ_LEN if PREFERRED_SEQ_LEN in lengths else max(lengths)
        return replace(
            self,
            seq_len=self.seq_len or preferred,
            rank=self.rank or manifest.ranks[0],
            optimizer=optimizer,
            learning_rate=rate,
            group_size=self.group_size or (GROUP_SIZE if self.reward else None),
        )
