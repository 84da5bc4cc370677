"""Which ways of running a product are measured."""

from __future__ import annotations

import torch

from headstart.eval.kernels.linear import DEFAULT, Linear, Tiles, row_bucket
from headstart.eval.kernels.ways import candidates, in_turn


def test_ways_of_a_product() -> None:
    """What is measured: tiles that suit the size, and nothing but 16-bit numbers the matrix units."""

    def ways(outputs: int, inputs: int, rows: int, dtype: torch.dtype = torch.bfloat16) -> list[Tiles | None]:
        return candidates(Linear(torch.empty((outputs, inputs), dtype=dtype, device="meta"), residual=True), rows)

    def whole(*product: int) -> list[int]:
        return [tiles.splits for tiles in ways(*product) if tiles is not None and tiles.whole]

    # as far as a program's memory goes, a draft's output matrix included; not for what no card holds at once, nor for a
    # single row
    assert whole(576, 576, 4) == [1, 2, 4] == whole(576, 576, 64)
    assert whole(576, 1536, 4) == [2, 4] == whole(576, 1536, 64)
    assert whole(16000, 576, 4) == [1, 2, 4] and whole(32000, 576, 4) == []
    assert whole(6144, 4096, 4) == [] == whole(576, 576, 1)
    # what is padded counts: 1408 inputs are held as 1024 and 512
    assert whole(576, 1408, 4) == [2, 4]
    for rows in (1, 64):
        assert any(tiles is not None and tiles.splits > 1 for tiles in ways(4096, 14336, rows))
    # parts: added up with a residual, or worth a launch of their own, as of a draft's three streams
    plain = [Linear(torch.empty(size, dtype=torch.bfloat16, device="meta")) for size in ((576, 1728), (1728, 576))]
    parts = [sum(tiles is not None and tiles.splits > 1 for tiles in candidates(linear, 6)) for linear in plain]
    assert parts[0] > 0 == parts[1]
    # timed on as many as do not fit into the cache together: weights come from memory in a model
    small = [Linear(torch.empty((576, 576), dtype=torch.bfloat16, device="meta")) for _ in range(30)]
    assert [len(in_turn(small, size << 20)) for size in (1, 6, 50)] == [8, 19, 30]
    # a draft has one of each, which takes turns with itself
    assert in_turn(small[:1], 1 << 20) == small[:1] * 8 and len(in_turn(small[:3], 1 << 20)) == 9
    # compiled for float32 such kernels take minutes, and only a single row gains
    assert ways(576, 1536, 24, torch.float32) == [None]
    assert all(tiles is None or tiles.vector for tiles in ways(576, 1536, 1, torch.float32))
    for dtype in (torch.float32, torch.bfloat16):
        assert None in ways(576, 1536, 1, dtype)


def test_ways_of_more_rows_than_a_tile() -> None:
    """cuBLAS always, and few others: they cost time to measure."""

    def ways(outputs: int, inputs: int, rows: int, dtype: torch.dtype = torch.bfloat16) -> list[Tiles | None]:
        return candidates(Linear(torch.empty((outputs, inputs), dtype=dtype, device="meta"), residual=True), rows)

    for rows in (65, 128, 129, 256, 512):
        for size in ((576, 576), (576, 1536), (960, 576), (4096, 14336), (128256, 4096)):
            found = ways(*size, rows)
            assert found[:3] == [None, DEFAULT, Tiles(128, 64, 4, 5)] and len(found) == len(set(found))
            # what is kept on disk for these rows is looked for among them
            assert found == ways(*size, row_bucket(rows))
            assert not any(tiles is not None and tiles.vector for tiles in found)
        assert ways(576, 1536, rows, torch.float32) == [None]
        # a program holds as many rows as with 64, so that the same matrices fit
        assert [tiles.splits for tiles in ways(576, 1536, rows) if tiles is not None and tiles.whole] == [2, 4]
        assert len(ways(576, 1536, rows)) <= 8
    assert len(ways(4096, 14336, 129)) == 3 < len(ways(4096, 14336, 128)) <= 12
    assert ways(4096, 14336, 512) == ways(4096, 14336, 256)
