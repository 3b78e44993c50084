"""The mathematics of MeSP in plain MLX, for comparison with the other implementations.

`NAME_backward` is the backward pass of the function `NAME`. In a backward pass, `dy` is the
gradient of the loss with respect to `y`. The modules are

- `pieces`: shared formulas, such as a linear layer with LoRA
- `dropout`: the masks of LoRA dropout
- `attention`, `gated_delta_net`, `short_convolution`, `mamba2`: the mixers of a block
- `chunks`: what the recurrent mixers share
- `experts`: a mixture of experts
- `per_layer`: per-layer embeddings
- `block`: a whole block
- `head`: the head and the loss
- `methods`: the training methods MeSP, MeBP and MeZO
- `preferences`, `rewards`: the objectives of preference data and of rewards
- `adamw8bit`: an optimizer
- `private`: DP-SGD
- `model`: the weights

Floating-point arithmetic is float32. Sizes: T tokens, heads (of queries), kv_heads (of keys and
values), D = head_dim, V = vocabulary. ∘ is the elementwise product.
"""

from mesp.reference.adamw8bit import *
from mesp.reference.attention import *
from mesp.reference.block import *
from mesp.reference.chunks import *
from mesp.reference.dropout import *
from mesp.reference.experts import *
from mesp.reference.gated_delta_net import *
from mesp.reference.head import *
from mesp.reference.mamba2 import *
from mesp.reference.methods import *
from mesp.reference.model import *
from mesp.reference.per_layer import *
from mesp.reference.pieces import *
from mesp.reference.preferences import *
from mesp.reference.private import *
from mesp.reference.rewards import *
from mesp.reference.short_convolution import *
