// Creates primitives of `mx::fast` for a GPU. Without a GPU, MLX's own functions create separate plain operations instead.

#ifndef FUSED_PRIMITIVES_H
#define FUSED_PRIMITIVES_H

#include <optional>

#include "mlx/mlx.h"

namespace ledger {

mlx::core::array rms_norm(
    const mlx::core::array &x, const mlx::core::array &weight, float eps, mlx::core::Stream stream);

mlx::core::array rope(
    const mlx::core::array &x, int dimensions, bool traditional, std::optional<float> base, float scale, int offset,
    const std::optional<mlx::core::array> &frequencies, mlx::core::Stream stream);

}  // namespace ledger

#endif
