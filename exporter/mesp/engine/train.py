from __future__ import annotations

import json
import math
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from mesp.adapters.weighted import StrPath, check_folder
from mesp.bundle.data_files import write_data, write_index
from mesp.bundle.manifest import Manifest, read_manifest
from mesp.bundle.model_card import write_terms_of_run
from mesp.bundle.reader import Bundle
from mesp.data.fields import OPTIONS
from mesp.data.load import load_additional, read_general_text
from mesp.data.splits import Split
from mesp.data.tokenizer import load_bundle_tokenizer, load_tokenizer
from mesp.engine.build import find_engine
from mesp.engine.process import Engine, Record, check_device, failure, find_plan, log, running
from mesp.engine.replay_texts import sample_replay_texts
from mesp.errors import Interrupted, MespError, plain_os_errors
from mesp.files import read_settings, write_whole
from mesp.folders import refuse_linked_folders
from mesp.models.config_json import check_lengths
from mesp.rewards import Reward, compute_rewards, find_reward
from mesp.runs.log import LOG_NAME, RunLog
from mesp.settings.declaration import Settings, list_settings, refuse_changes
from mesp.settings.rules import check_settings
from mesp.settings.train_settings import MAX_STEPS, TrainSettings

SETTINGS_NAME = "settings.json"
GENERAL, REPLAY = "general", "replay"


@dataclass(frozen=True)
class TrainingJob:
    bundle: Path
    manifest: Manifest
    settings: TrainSettings
    folder: Path
    resume: bool = False
    reward: Reward | None = None

    def to_json(self) -> dict[str, Any]:
        paths = {"bundle": str(self.bundle), "output": str(self.folder.resolve())}
        settings = {**paths, **self.settings.to_json(), "resume": self.resume, "dry_run": False}
        if self.settings.reward is not None:
            settings["stop"] = sorted(load_bundle_tokenizer(self.bundle).eos_token_ids)
        if self.settings.max_forgetting is not None:
            settings["general"] = str(self.folder.resolve() / GENERAL)
        if self.settings.replay is not None:
            settings["replay"] = str(self.folder.resolve() / REPLAY)
        return settings

    def of_epochs(self, epochs: float) -> TrainingJob:
        # Without a warm-up, which is compared with the steps below.
        plan = find_plan(find_engine(), {**self.to_json(), "epochs": epochs, "warmup": 0})
        settings = replace(self.settings, steps=plan["steps"])
        check_settings(settings, self.manifest)
        return replace(self, settings=settings)

    def run(self, progress: Callable[[Record], None] | None = None) -> RunLog:
        check_device(self.settings.device)
        try:
            return self._train(progress)
        finally:
            try:
                write_terms_of_run(self.bundle, self.manifest, self.folder)
            # a missing licence must not hide how the run ended
            except (MespError, OSError) as error:
                log.warning("The licence could not be put beside the adapters: %s", error)

    def _train(self, progress: Callable[[Record], None] | None) -> RunLog:
        reward = None
        if self.reward is not None:
            reward = _Rewards(self.reward, load_bundle_tokenizer(self.bundle))
        settings = (json.dumps(self.to_json(), indent=2) + "\n").encode()
        written = self.folder / SETTINGS_NAME
        with _settings_file(written, settings, self.resume) as (path, made):
            if self.settings.max_forgetting is not None:
                self._write_tokens(GENERAL, self._general, made)
            if self.settings.replay is not None:
                self._write_tokens(REPLAY, self._replayed, made)
            stdin = subprocess.DEVNULL if reward is None else subprocess.PIPE
            with running([], path, stdin=stdin, interruptible=True) as engine:
                for record in engine:
                    if path != written:
                        # The engine has accepted the new settings of a resumed run. Only now do
                        # they replace the old settings.
                        path = written
                        with plain_os_errors(f"Cannot write the run to {self.folder}"):
                            write_whole(written, settings)
                    if reward is not None and record["type"] == "samples":
                        try:
                            reward.answer(engine, record["groups"])
                        except KeyboardInterrupt:
                            break
                        continue
                    if progress is not None:
                        progress(record)
                        if engine.signals:
                            progress({"type": "stopping"})
            # The log of a resumed run also has the records from before it was resumed. So the log
            # is read, not the printed records.
            has_log = (self.folder / LOG_NAME).exists()
            run = RunLog.load(self.folder) if has_log else RunLog()
            if engine.process.returncode == 0 and run.end:
                if engine.said:
                    log.warning("%s", engine.said)
                if reward is not None and reward.error is not None:
                    said = f"{reward.error.message} Mend it.{self._left()}"
                    raise MespError(said) from reward.error
                is_stopped = run.end.get("reason") == "stopped" and engine.signals
                return replace(run, stopped_by=engine.signals[0] if is_stopped else None)
            if len(engine.signals) > 1:
                said = f"The run was ended at once.{self._left()}"
                raise Interrupted(said, engine.signals[0])
            error = failure(engine.process.returncode, engine.said, f" after step {run.last_step}")
            raise type(error)(error.message + self._left())

    def _write_tokens(self, name: str, tokens: Callable[[Any], Split], made: list[Path]) -> None:
        """Writes a folder of tokens for the engine, and appends the folder to `made` if it is new.

        A resumed run keeps its folder, because other texts would change the run's result.
        """
        folder = self.folder / name
        if self.resume:
            if not (folder / "data.json").exists():
                raise MespError(f"{folder} with texts of the run is missing; start a new run.")
            return
        option = {GENERAL: "--max-forgetting", REPLAY: "--replay"}[name]
        split = tokens(load_tokenizer(self.bundle, f"which {option} needs; leave it out"))
        with plain_os_errors(f"Cannot write the run to {self.folder}"):
            if not folder.exists():
                folder.mkdir()
                made.append(folder)
            write_index(folder, write_data(folder, "data", {"train": split}))

    def _general(self, tokenizer: Any) -> Split:
        file = None if self.settings.general is None else Path(self.settings.general)
        return read_general_text(file, tokenizer, self.manifest.architecture.vocab_size)

    def _replayed(self, tokenizer: Any) -> Split:
        settings = self.settings
        assert settings.seq_len is not None and settings.replay is not None
        if settings.replay_data is not None:
            vocab_size = self.manifest.architecture.vocab_size
            split = load_additional(
                settings.replay_data, tokenizer, settings.seq_len, vocab_size,
                self.manifest.encoding,
            )  # fmt: skip
            if split.labels is not None:
                raise MespError(
                    f"{settings.replay_data} is preference data, which cannot be replayed: give "
                    "--replay-data other records."
                )
            return split
        sequences = settings.steps * settings.batch_size * settings.grad_accumulation_steps
        log.info("Sampling texts of the model to replay")
        return sample_replay_texts(
            self.bundle,
            settings.adapters,
            tokenizer,
            math.ceil(sequences * settings.replay),
            settings.seq_len,
            settings.seed,
            self.manifest.encoding.get(OPTIONS),
            settings.device,
        )

    def _left(self) -> str:
        if not (self.folder / LOG_NAME).exists():
            return ""
        adapters, left = self.folder / "adapters", "no adapters had been saved"
        if (adapters / "adapters.safetensors").exists():
            left = f"the adapters last saved are in {adapters}"
        return (
            f" The log is in {self.folder / LOG_NAME}; {left}. Continue the run with --resume and "
            f"--out {self.folder}."
        )


class _Rewards:
    def __init__(self, reward: Reward, tokenizer: Any) -> None:
        self._reward, self._tokenizer = reward, tokenizer
        self.error: MespError | None = None

    def answer(self, engine: Engine, groups: Sequence[dict[str, Any]]) -> None:
        decode = self._tokenizer.decode
        prompts, completions, references = [], [], []
        for group in groups:
            prompt, reference = decode(group["prompt"]), decode(group["reference"])
            for answer in group["answers"]:
                prompts.append(prompt)
                completions.append(decode(answer))
                references.append(reference)
        try:
            with engine.interrupting():
                given = compute_rewards(self._reward, prompts, completions, references)
        except MespError as error:
            self.error = error
            assert engine.process.stdin is not None
            engine.process.stdin.close()
            return
        rewards = iter(given)
        engine.send([[next(rewards) for _ in group["answers"]] for group in groups])


def train(
    bundle: Bundle | StrPath | None = None,
    *,
    out: StrPath | None = None,
    resume: bool = False,
    paper: bool = False,
    epochs: float | None = None,
    progress: Callable[[Record], None] | None = None,
    **settings: Any,
) -> RunLog:
    """Fine-tunes a bundle's model, and returns the run.

    Ctrl-C ends the run after the current step and saves its adapters. Then `state()` of the
    returned run is ``stopped``, and `resume` continues the run.

    Args:
        bundle: A bundle or its folder; not needed to resume a run.
        out: The run's folder; by default ``runs/BUNDLE-METHOD-TIME``.
        resume: Continue the run in `out`. Only some settings may change, such as `steps` and
            `memory_limit`. A reward ``module:function`` must be named again.
        paper: Update as in the paper, with SGD at 1e-4.
        epochs: Passes over the training data, in place of `steps`; of a resumed run, all passes.
        progress: Called with each record of the run's log as it arrives, and after a signal also
            with the record ``{"type": "stopping"}``; docs/formats.md describes the log's records.
        settings: Fields of `TrainSettings`, such as ``rank=8`` or ``memory_limit=60`` (10⁶ bytes).
            A new run needs `steps` or `epochs`.

    Raises:
        MespError: A setting, the bundle, the reward or the folder cannot be used, or the engine
            refuses them.
        EngineError: The engine crashed, or the system ended it; the last saved adapters remain.
        Interrupted: A second signal ended the run at once.
    """
    return prepare_training(bundle, out, resume, paper, settings, epochs).run(progress)


def prepare_training(
    bundle: Bundle | StrPath | None,
    out: StrPath | None,
    resume: bool,
    paper: bool,
    given: Mapping[str, Any],
    epochs: float | None = None,
    may_import: bool = True,
) -> TrainingJob:
    """Returns the run that `train` begins or resumes. Writes nothing.

    A reward's module is imported only with `may_import`, and only if `given` names it.
    """
    given = {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in given.items()
        if value is not None
    }
    if epochs is not None:
        if "steps" in given:
            raise MespError("--epochs takes the place of --steps: leave out one of them.")
        if not 0 < epochs < math.inf:
            raise MespError(f"--epochs has {epochs:g}; give a number above 0.")
        given["steps"] = MAX_STEPS  # until the data are counted
    if "adapters" in given:
        check_folder(Path(given["adapters"]))
    for name in ("adapters", "general"):
        if name in given:
            given[name] = str(Path(given[name]).resolve())
    path = None
    if bundle is not None:
        path = bundle.path if isinstance(bundle, Bundle) else Path(bundle)
    folder = None if out is None else Path(out)
    if resume:
        path, settings = _resumed(folder, path, given)
    elif path is None:
        raise MespError("Name the bundle to train.")
    else:
        settings = TrainSettings.of(given)
    path = path.resolve()
    manifest = read_manifest(path)
    settings = settings.complete(manifest, paper)
    reward = None
    if settings.reward is not None:
        reward = find_reward(settings.reward, may_import and "reward" in given)
    check_settings(settings, manifest)
    check_length(path, manifest, settings)
    if settings.reward is not None:
        check_prompts(Bundle(path))
    folder = folder or default_folder(manifest, settings.method)
    if (folder / LOG_NAME).exists() and not resume:
        raise MespError(
            f"{folder} already holds a run: name another folder with --out, "
            "or resume it with --resume."
        )
    refuse_linked_folders(folder)
    job = TrainingJob(path, manifest, settings, folder, resume, reward)
    return job if epochs is None else job.of_epochs(epochs)


def check_length(bundle: Path, manifest: Manifest, settings: TrainSettings) -> None:
    if settings.seq_len is not None and settings.seq_len not in manifest.seq_lens:
        check_lengths(Bundle(bundle).config(), [*manifest.seq_lens, settings.seq_len])


def check_prompts(bundle: Bundle) -> None:
    """Raises MespError if a training example does not have one prompt and then one answer in the
    loss.
    """
    if "train" not in bundle.manifest.data:
        return
    examples, mask = bundle.examples("train"), bundle.mask("train")
    if examples is None or mask is None:
        return
    for number, (start, length) in enumerate(examples.tolist(), 1):
        counted = mask[start : start + length]
        if counted[0] or np.count_nonzero(np.diff(counted) == 1) != 1:
            raise MespError(
                f"--reward needs records of a prompt and one answer, and record {number} of the "
                "bundle's is another: write the data with mesp data --loss-on last and without "
                "--long split."
            )


def default_folder(manifest: Manifest, kind: str) -> Path:
    return Path("runs") / f"{manifest.name}-{kind}-{datetime.now(UTC):%Y%m%dT%H%M%SZ}"


def _resumed(
    folder: Path | None, bundle: Path | None, given: Mapping[str, Any]
) -> tuple[Path, TrainSettings]:
    if folder is None:
        raise MespError("Name the folder of the run to resume with --out.")
    path, settings = read_recorded_settings(folder, LOG_NAME, TrainSettings)
    refuse_changes(settings, given, list_settings(TrainSettings))
    return bundle or path, replace(settings, **given)


def read_recorded_settings(folder: Path, begun: str, *kinds: type[Settings]) -> tuple[Any, ...]:
    """Returns the bundle of a run, and the settings of each kind."""
    path = folder / SETTINGS_NAME
    if not (folder / begun).exists():
        raise MespError(f"{folder} holds no run to resume; start one without --resume.")
    with plain_os_errors(f"Cannot read {path}"), suppress(ValueError):
        entries = read_settings(path)
        with suppress(MespError, KeyError, TypeError):
            return Path(entries["bundle"]), *(kind.from_json(entries) for kind in kinds)
    raise MespError(f"{path} is not the settings of a run; start a new one.")


@contextmanager
def _settings_file(path: Path, settings: bytes, resume: bool) -> Iterator[tuple[Path, list[Path]]]:
    home, made = path.parent, list[Path]()
    if resume:
        with tempfile.TemporaryDirectory(prefix="mesp-") as temporary:
            other = Path(temporary, SETTINGS_NAME)
            with plain_os_errors(f"Cannot write to {temporary}"):
                other.write_bytes(settings)
            yield other, made
        return
    missing = [folder for folder in (home, *home.parents) if not folder.exists()]
    try:
        with plain_os_errors(f"Cannot write the run to {home}"):
            home.mkdir(parents=True, exist_ok=True)
            write_whole(path, settings)
        yield path, made
    except BaseException:
        if not (home / LOG_NAME).exists():
            # `.lock` is the engine's lock.
            for file in (path, home / ".lock"):
                with suppress(OSError):
                    file.unlink()
            for folder in made:
                shutil.rmtree(folder, ignore_errors=True)
            for folder in missing:
                try:
                    folder.rmdir()
                except OSError:
                    break
        raise
