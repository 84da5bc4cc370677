"""Weights of a transformers module as the fused kernels want them: matrices end to end, norms as factors."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from headstart.eval.decoding.fused.errors import Unfusable
from headstart.eval.kernels.norm import NormWeights, norm_eager

#: eps that are tried where a norm's module has no such attribute
USUAL_EPS = (1e-5, 1e-6)


def merged(projections: list[nn.Module]) -> tuple[Tensor, Tensor | None]:
    """The projections' rows in one matrix (and bias). The projections' own weights become views of it."""
    for projection in projections:
        if type(projection) is not nn.Linear:
            raise Unfusable(f"a projection is {type(projection).__name__}, expected nn.Linear")
        if type(projection.weight) not in (Tensor, nn.Parameter):
            raise Unfusable(f"weights of a projection are {type(projection.weight).__name__}, expected plain numbers")
    with_bias = [projection for projection in projections if projection.bias is not None]
    if with_bias and len(with_bias) != len(projections):
        raise Unfusable("some projections of a group have a bias and others none")

    def merge(parameters: list[nn.Parameter]) -> Tensor:
        sizes = [parameter.shape[0] for parameter in parameters]
        whole = _as_one(parameters)
        for parameter, part in zip(parameters, whole.split(sizes), strict=True):
            parameter.data = part
        return whole

    weight = merge([projection.weight for projection in projections])
    return weight, merge([projection.bias for projection in projections]) if with_bias else None


def _as_one(parameters: list[nn.Parameter]) -> Tensor:
    """The parameters end to end, without a copy where an earlier fusion has made them consecutive views."""
    first = parameters[0].data
    expected = first.data_ptr()
    for parameter in parameters:
        if parameter.data_ptr() != expected or not parameter.is_contiguous():
            return torch.cat([parameter.data for parameter in parameters])
        expected += parameter.numel() * parameter.element_size()
    if len(parameters) == 1:
        return first
    rows = sum(parameter.shape[0] for parameter in parameters)
    inside = first.untyped_storage().nbytes() // first.element_size() - first.storage_offset()
    if inside < rows * (first.numel() // first.shape[0]):
        return torch.cat([parameter.data for parameter in parameters])
    return first.as_strided((rows, *first.shape[1:]), first.stride())


@torch.no_grad()
def norm_weights(norm: nn.Module, width: int, device: torch.device) -> NormWeights:
    """The weights of an RMSNorm or LayerNorm over `width` channels, found by running it in float32.

    RMSNorm and LayerNorm are tried, with the factor weight, 1 + weight or 1. The one whose output equals the module's
    is returned. Raises: Unfusable where none does.
    """
    weight, bias = getattr(norm, "weight", None), getattr(norm, "bias", None)
    if weight is not None and weight.shape != (width,):
        raise Unfusable(f"the weight of {type(norm).__name__} has the shape {tuple(weight.shape)}, expected ({width},)")
    stated = getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
    all_eps = USUAL_EPS if stated is None else (float(stated),)
    probe = torch.randn((2, width), generator=torch.Generator().manual_seed(0)).to(device) + 0.5
    probe[1] *= all_eps[0] ** 0.5  # so small that eps counts
    expected = copy.deepcopy(norm).float()(probe)
    ones = torch.ones(width, device=device)
    factors = [ones] if weight is None else [weight.float(), weight.float() + 1]
    shift = None if bias is None else bias.float().contiguous()
    for factor in factors:
        for centred in (False, True):
            for eps in all_eps:
                found = NormWeights(factor.contiguous(), eps, shift, centred)
                if torch.allclose(norm_eager(probe, found), expected, rtol=1e-4, atol=1e-5):
                    return found
    raise Unfusable(f"{type(norm).__name__} is neither an RMSNorm nor a LayerNorm")
