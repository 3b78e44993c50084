import math
from dataclasses import dataclass, field
from pathlib import Path

import mlx.core as mx
import mlx.optimizers as optim
import numpy as np

from mesp import reference
from mesp.bundle.reader import Bundle

SEQ_LEN = 32
RANK = 8
STEPS = 5
ALPHA = 16.0

Parameters = dict[str, mx.array]  # by their names in adapters.safetensors


@dataclass
class Recipe:
    optimizer: optim.Optimizer
    optimizer_of_b: optim.Optimizer | None = None  # if set, trains the matrices B
    sequences: int = 1  # sequences per step
    max_grad_norm: float | None = None
    projections: tuple[str, ...] = ("q", "k", "v", "o", "gate", "up", "down")
    num_layers: int | None = None
    blocks_per_step: float | None = None
    freeze_a: bool = False
    dropout: float = 0.0
    scale: float = ALPHA / RANK
    start: Parameters | None = None
    seed: int = 0


@dataclass
class Trained:
    start: Parameters
    end: Parameters
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)


@dataclass
class Oracle:
    model: reference.Model
    sequences: list[list[tuple[mx.array, mx.array]]]
    rows: mx.array | None = None  # of images; a token -1 - r stands for row r

    @classmethod
    def of(cls, path: Path, seq_len: int = SEQ_LEN) -> "Oracle":
        bundle = Bundle(path)
        tokens = bundle.tokens("train").astype(np.int64)
        windows = range(0, len(tokens) - seq_len, seq_len)
        bounds = [(start, seq_len + 1) for start in windows]
        if (examples := bundle.examples("train")) is not None:
            bounds = examples.tolist()
        mask = np.ones(len(tokens)) if bundle.mask("train") is None else bundle.mask("train")
        records, rows = [], None
        if images := bundle.images("train"):
            rows, places = images
            tokens = np.where(places > 0, -places.astype(np.int64), tokens)
        for start, length in bounds:
            stop = start + min(length, seq_len + 1)
            counted = 1 + np.flatnonzero(mask[start + 1 : stop])
            if counted.size:
                records.append((mx.array(tokens[start:stop]), mx.array(counted)))
        sequences = [[record] for record in records]
        if bundle.pack("train"):
            lengths = [record.size for record, _ in records]
            packed = reference.pack(lengths, seq_len)
            sequences = [[records[index] for index in each] for each in packed]
        return cls(reference.Model.of(bundle), sequences, rows)

    def initial(self, recipe: Recipe) -> Parameters:
        arch = self.model.arch
        flat = reference.init_lora(arch, RANK, recipe.seed)
        first = arch.num_hidden_layers - (recipe.num_layers or arch.num_hidden_layers)
        parameters = {}
        for index in range(first, arch.num_hidden_layers):
            for name, (a, b) in reference.unpack_lora(flat[index], arch.blocks[index]).items():
                if name.split(".")[1].removesuffix("_proj") in recipe.projections:
                    parameters[f"model.layers.{index}.{name}.lora_a"] = a
                    parameters[f"model.layers.{index}.{name}.lora_b"] = b
        return parameters | (recipe.start or {})

    def loss(
        self,
        parameters: Parameters,
        records: list,
        scale: float,
        dropout: reference.Dropout | None = None,
    ) -> mx.array:
        arch, losses = self.model.arch, []
        lora = []
        for index, block in enumerate(arch.blocks):
            prefix = f"model.layers.{index}."
            matrices = {
                name: (
                    parameters.get(f"{prefix}{name}.lora_a", mx.zeros((inp, RANK))),
                    parameters.get(f"{prefix}{name}.lora_b", mx.zeros((RANK, out))),
                )
                for name, (out, inp) in block.sizes().items()
            }
            lora.append(reference.pack_lora(matrices, block))
        for number, (tokens, positions) in enumerate(records):
            own = dropout and dropout._replace(sequence=number)
            ids, images = mx.maximum(tokens[:-1], 0), None
            if self.rows is not None:
                images = self.rows, mx.maximum(-tokens[:-1], 0)
            y = reference.forward(self.model, lora, ids, scale, dropout=own, images=images)[0][-1]
            counted = y[:, positions - 1]
            mean = reference.cross_entropy(counted, tokens[positions], self.model.head, arch)
            losses.append((mean * counted.shape[1], counted.shape[1]))
        return sum(total for total, _ in losses) / sum(count for _, count in losses)

    def train(self, recipe: Recipe, steps: int = STEPS) -> Trained:
        parameters = self.initial(recipe)
        trained = Trained(parameters, parameters)
        gradient = mx.value_and_grad(self.loss)
        taken = 0
        blocks = sorted({int(name.split(".")[2]) for name in parameters})
        for step in range(steps):
            records = []
            for _ in range(recipe.sequences):
                records += self.sequences[
                    reference.step_window(taken, recipe.seed, len(self.sequences))
                ]
                taken += 1
            dropout = reference.Dropout(recipe.dropout, recipe.seed, step)
            own = dropout if recipe.dropout else None
            loss, gradients = gradient(parameters, records, recipe.scale, own)
            if recipe.freeze_a:
                gradients = {n: each * n.endswith("lora_b") for n, each in gradients.items()}
            if share := recipe.blocks_per_step:
                drawn = reference.draw_blocks(blocks, share, recipe.seed, step)
                gradients = {n: g for n, g in gradients.items() if int(n.split(".")[2]) in drawn}
            if recipe.max_grad_norm:
                gradients, norm = optim.clip_grad_norm(gradients, recipe.max_grad_norm)
                trained.norms.append(norm.item())
            of_b = recipe.optimizer_of_b or recipe.optimizer
            if step == 0:
                recipe.optimizer.init(parameters)
                of_b.init(parameters)
            for optimizer in {id(each): each for each in (recipe.optimizer, of_b)}.values():
                its = {
                    name: gradient
                    for name, gradient in gradients.items()
                    if optimizer is (of_b if name.endswith("lora_b") else recipe.optimizer)
                }
                parameters = parameters | optimizer.apply_gradients(its, parameters)
                mx.eval(parameters, optimizer.state)
            trained.rates.append(recipe.optimizer.learning_rate.item())
            trained.losses.append(loss.item())
        trained.end = parameters
        return trained


def saved(output: Path) -> Parameters:
    adapters = mx.load(str(output / "adapters" / "adapters.safetensors"))
    # mlx-lm puts `language_model.` before the names in multimodal models, mlx-vlm in place of it.
    return {f"model.{name[name.index('layers.') :]}": each for name, each in adapters.items()}


def distance(a: Parameters, b: Parameters) -> float:
    assert a.keys() == b.keys()
    return math.sqrt(sum(mx.sum(mx.square(a[name] - b[name])).item() for name in a))
