import mlx.core as mx
import mlx.nn as nn


class TRL:
    """TRL 1.9.0's losses in MLX, with TRL's names and order of operations.

    Sources: DPOTrainer (`loss_type` sigmoid and ipo), CPOTrainer (simpo with `cpo_alpha=0`),
    ORPOTrainer and KTOTrainer (`loss_type` kto). Arrays have one element per pair, or one per
    record for kto.
    """

    def __init__(self, beta: float, desirable_weight: float = 1.5) -> None:
        self.beta, self.desirable_weight = beta, desirable_weight

    def sigmoid(self, chosen_logps, rejected_logps, ref_chosen_logps, ref_rejected_logps, **_):
        chosen_logratios = chosen_logps - ref_chosen_logps
        rejected_logratios = rejected_logps - ref_rejected_logps
        delta_score = chosen_logratios - rejected_logratios
        return -nn.log_sigmoid(self.beta * delta_score).mean()

    def ipo(
        self, chosen_logps, rejected_logps, ref_chosen_logps, ref_rejected_logps,
        chosen_count, rejected_count, **_,
    ):  # fmt: skip
        chosen_avg_score = (chosen_logps - ref_chosen_logps) / chosen_count
        rejected_avg_score = (rejected_logps - ref_rejected_logps) / rejected_count
        ipo_delta = chosen_avg_score - rejected_avg_score
        return ((ipo_delta - 1 / (2 * self.beta)) ** 2).mean()

    def simpo(self, chosen_logps, rejected_logps, chosen_count, rejected_count, **_):
        logits = chosen_logps / chosen_count - rejected_logps / rejected_count
        gamma_logratios = 0.5 / self.beta
        logits = logits - gamma_logratios
        return -nn.log_sigmoid(self.beta * logits).mean()

    def orpo(
        self, chosen_logps, rejected_logps, chosen_count, rejected_count, chosen_nll_loss, **_
    ):
        policy_chosen_logps = chosen_logps / chosen_count
        policy_rejected_logps = rejected_logps / rejected_count
        log_odds = (policy_chosen_logps - policy_rejected_logps) - (
            mx.log1p(-mx.exp(policy_chosen_logps)) - mx.log1p(-mx.exp(policy_rejected_logps))
        )
        losses = self.beta * nn.log_sigmoid(log_odds)
        return chosen_nll_loss - losses.mean()

    def kto(self, logps, ref_logps, KL_logps, ref_KL_logps, labels):
        kl = mx.stop_gradient(mx.maximum((KL_logps - ref_KL_logps).mean(), 0))
        chosen_losses = 1 - mx.sigmoid(self.beta * (logps - ref_logps - kl))
        rejected_losses = 1 - mx.sigmoid(self.beta * (kl - (logps - ref_logps)))
        return mx.where(labels, self.desirable_weight * chosen_losses, rejected_losses).mean()
