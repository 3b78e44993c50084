from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields

from mesp.bundle.manifest import Manifest, check_rank
from mesp.errors import MespError
from mesp.settings.declaration import name_option
from mesp.settings.train_settings import MAX_SEQUENCES, TrainSettings


def check_settings(settings: TrainSettings, manifest: Manifest) -> None:
    check_use(settings, manifest)
    _check_goal(settings, manifest)
    _check_privacy(settings)
    _check_reward(settings, manifest)
    _check_forgetting(settings, manifest)


def check_use(settings: TrainSettings, manifest: Manifest) -> None:
    for each in fields(settings):
        declared = each.metadata["setting"]
        # A setting with its default value counts as not given.
        if getattr(settings, each.name) != each.default and not declared.applies(vars(settings)):
            other, values = declared.only_with
            wanted = f" {' or '.join(values)}" if values else ""
            raise MespError(
                f"{name_option(each.name)} has no use without {name_option(other)}{wanted}: "
                "leave it out."
            )
    if settings.freeze_a and settings.loraplus_lr_ratio != 1:
        raise MespError(
            "--loraplus-lr-ratio has no use with --freeze-a, which trains each B only: set "
            "--learning-rate."
        )
    size = settings.batch_size * settings.grad_accumulation_steps * (settings.group_size or 1)
    if size > MAX_SEQUENCES:
        raise MespError(f"A step of {size:,} sequences is too large: at most {MAX_SEQUENCES:,}.")
    if settings.warmup >= settings.steps:
        raise MespError(f"--warmup {settings.warmup} does not end within --steps {settings.steps}.")
    arch = manifest.architecture
    check_rank(settings.rank or 1, arch)
    for name in settings.projections or ():
        if name not in arch.trainable:
            raise MespError(
                f"--projections {name} is not in the model's blocks; "
                f"they have {', '.join(arch.trainable)}."
            )
    layers = arch.num_hidden_layers
    if (settings.num_layers or 1) > layers:
        raise MespError(f"--num-layers {settings.num_layers} is more than the {layers} blocks.")
    if settings.dropout:
        # MeZO, objectives and rewards compare losses or likelihoods, and dropout would add noise.
        # MeBP's block function has no masks.
        refused = {
            f"--method {settings.method}": settings.method != "mesp",
            f"--objective {settings.objective}": settings.objective is not None,
            "--reward": settings.reward is not None,
        }
        _refuse_beside("--dropout", refused)
    if settings.dora:
        # MeBP and --max-forgetting handle A and B only, and no magnitudes. Neither mlx-lm nor PEFT
        # has magnitudes of experts.
        refused = {
            "--method mebp": settings.method == "mebp",
            "--freeze-a": settings.freeze_a,
            "--projections experts": "experts" in (settings.projections or ()),
            "--max-forgetting": settings.max_forgetting is not None,
        }
        _refuse_beside("--dora", refused)


def _check_goal(settings: TrainSettings, manifest: Manifest) -> None:
    if settings.objective == "kto" and settings.batch_size < 2:
        raise MespError(
            "--objective kto takes each prompt with the answer of another record of the batch: "
            "set --batch-size to 2 or more."
        )
    _check_labels(settings, manifest)
    if settings.eval_every and not (settings.val_batches and "valid" in manifest.data):
        raise MespError(
            "--eval-every needs evaluations: --val-batches above 0, and a bundle with held-out "
            "data."
        )
    if settings.early_stopping and not settings.eval_every:
        raise MespError(
            "--early-stopping needs evaluations during the run: --eval-every and --val-batches "
            "above 0, and a bundle with held-out data."
        )
    if settings.test and "test" not in manifest.data:
        raise MespError("--test needs test data, and the bundle has none: export it with some.")
    if settings.test and not settings.val_batches:
        raise MespError("--test needs --val-batches above 0, the number of test sequences.")


def _check_labels(settings: TrainSettings, manifest: Manifest) -> None:
    train = manifest.data.get("train")
    if train is None or (train.labels is not None) == (settings.objective is not None):
        return
    if settings.objective is None:
        raise MespError(
            "The bundle's data is preference data: choose an --objective for "
            "them, or give it other data with mesp data."
        )
    kto = settings.objective == "kto"
    answers = '"completion" and "label"' if kto else '"chosen" and "rejected"'
    raise MespError(
        f'--objective {settings.objective} needs records of a "prompt", {answers}, and the bundle '
        "has others: give it some with mesp data."
    )


def _check_reward(settings: TrainSettings, manifest: Manifest) -> None:
    if settings.reward is None:
        return
    refused = {
        "--method mezo": settings.method == "mezo",
        f"--objective {settings.objective}": settings.objective is not None,
        "--dp-clip": settings.dp_clip is not None,
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


def _check_forgetting(settings: TrainSettings, manifest: Manifest) -> None:
    refused = {
        f"--objective {settings.objective}": settings.objective is not None,
        "--reward": settings.reward is not None,
    }
    if settings.replay is not None:
        _refuse_beside("--replay", refused | {"--dp-clip": settings.dp_clip is not None})
    if settings.max_forgetting is None:
        return
    # With an objective or rewards, the loss on the data's answers does not measure what is learned.
    for typed, is_given in refused.items():
        _refuse_beside(typed, {"--max-forgetting": is_given})
    if not settings.val_batches or "valid" not in manifest.data:
        raise MespError(
            "--max-forgetting needs evaluations: --val-batches above 0, and a bundle with "
            "held-out data."
        )


def _check_privacy(settings: TrainSettings) -> None:
    if settings.dp_clip is None and settings.dp_noise is None:
        return
    if settings.dp_clip is None or settings.dp_noise is None:
        raise MespError(
            "--dp-clip and --dp-noise go together: give both, with --dp-noise 0 for no noise."
        )
    refused = {
        "--method mezo": settings.method == "mezo",
        "--objective kto": settings.objective == "kto",
        f"--max-grad-norm {settings.max_grad_norm}": settings.max_grad_norm is not None,
        "--skip-bad-steps": settings.skip_bad_steps,
    }
    _refuse_beside("--dp-clip", refused)
    if settings.grad_accumulation_steps > 1:
        raise MespError(
            "--dp-clip takes one batch a step: leave out --grad-accumulation-steps, and set "
            "--batch-size to the examples of a step."
        )


def _refuse_beside(option: str, others: Mapping[str, bool]) -> None:
    for typed, is_given in others.items():
        if is_given:
            raise MespError(f"{typed} does not go together with {option}: leave out one of them.")
