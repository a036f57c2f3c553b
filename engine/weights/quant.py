"""The routed experts of a layer: collected as the checkpoint's bytes, then packed for the kernels."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch

from engine.config import ModelConfig
from engine.weights.mapping import EXPERT_TENSORS, TensorSpec
from kimi_kernels import moe

E8M0_NAN = 255  # the one scale byte that is no number


@dataclass(slots=True)
class ExpertBuffers:
    """One layer's experts, stacked over experts, w1 rows above w3 rows: {"w13.data": [E, 2I, D/2], ...}."""

    config: ModelConfig
    device: torch.device
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)
    left: int = 0  # tensors still to come

    def __post_init__(self) -> None:
        c = self.config
        fields = EXPERT_TENSORS[c.expert_format]
        shapes = {
            "w13": (2 * c.moe_intermediate_size, c.routed_expert_hidden_size),
            "w2": (c.routed_expert_hidden_size, c.moe_intermediate_size),
        }
        for stack, (rows, cols) in shapes.items():
            for _, name, per_value, dtype in fields:
                shape = (c.num_experts, rows, cols // per_value)
                self.buffers[f"{stack}.{name}"] = torch.empty(shape, dtype=dtype, device=self.device)
        self.left = 3 * len(fields) * c.num_experts

    def place(self, spec: TensorSpec) -> torch.Tensor:
        """The part of the buffers that an expert's tensor fills."""
        return self.buffers[spec.target.split(".experts.")[1]][spec.expert, spec.row : spec.row + spec.shape[0]]

    def has_bad_scale(self) -> bool:
        """True when a byte of the E8M0 scales is 255, which stands for NaN. One look at a whole layer: it is cheap."""
        return any(bool(b.max() == E8M0_NAN) for name, b in self.buffers.items() if name.endswith(".scale"))

    def bad_scales(self, specs: Iterable[TensorSpec]) -> list[str]:
        """The names, of these experts' tensors, that hold such a byte."""
        scales = [s for s in specs if s.target.endswith(".scale")]
        return [s.name for s in scales if bool(self.place(s).max() == E8M0_NAN)]

    def pack(self) -> tuple[moe.ExpertWeights, moe.ExpertWeights]:
        """(w13, w2) in the layout of the device's kernels.

        The reference's "plain" layout is these buffers as they are; going through moe.pack_* would hold a layer twice.
        """
        c, b = self.config, self.buffers
        width, latent = c.moe_intermediate_size, c.routed_expert_hidden_size
        if self.device.type == "cpu":
            return (
                moe.ExpertWeights(
                    c.expert_format, "plain", b["w13.data"], b.get("w13.scale"), c.num_experts, 2 * width, latent, 2
                ),
                moe.ExpertWeights(
                    c.expert_format, "plain", b["w2.data"], b.get("w2.scale"), c.num_experts, latent, width
                ),
            )
        w1, w3 = b["w13.data"][:, :width], b["w13.data"][:, width:]
        if c.expert_format == "bf16":
            return moe.pack_bf16(w1, w3, b["w2.data"])
        s1, s3 = b["w13.scale"][:, :width], b["w13.scale"][:, width:]
        return moe.pack_mxfp4(w1, s1, w3, s3, b["w2.data"], b["w2.scale"])
