"""What a kernel for decode rows must do, on whatever device it runs: compared with each row by itself."""

import torch

from gpuworker.generation.cache import KVCache
from tests.test_paged_attention import by_itself, scattered

CASES = [
    {},
    {"window": 1},
    {"window": 24},
    {"window": 300},
    {"heads": 9, "key_heads": 3, "width": 64, "value_width": 64},
    {"heads": 4, "key_heads": 4, "width": 80, "value_width": 80},
    {"heads": 20, "key_heads": 1, "width": 24, "value_width": 40},
]
LENGTHS = [1, 15, 16, 17, 64, 65, 255, 256, 257, 700]


def compare(kernel, device, dtype, tolerance, heads=6, key_heads=2, width=16, value_width=16, window=None, lengths=LENGTHS):
    """Slots behind the end of a row hold NaN, as somebody else may have left there. The result is the same with batch-mates, alone and with a wider table."""
    torch.manual_seed(2)
    cache = KVCache(200, dtype=dtype)
    token = [torch.zeros(1, key_heads, 1, each, dtype=dtype) for each in (width, value_width)]
    layer = cache.layer(0, *token)
    chunks, _ = scattered([(length - 1, 1) for length in lengths], blocks=200)
    own = torch.tensor([chunk.sequence.blocks[at // 16] * 16 + at % 16 for chunk in chunks for at in range(chunk.start + 1)])
    layer.blocks.fill_(float("nan"))
    layer.blocks.flatten(0, 1)[own] = torch.randn(len(own), key_heads, width + value_width).to(dtype)
    width_of_table = max(len(chunk.sequence.blocks) for chunk in chunks)
    table = torch.tensor([(chunk.sequence.blocks + chunk.sequence.blocks[:1] * width_of_table)[:width_of_table] for chunk in chunks])
    query = torch.randn(heads, len(chunks), width).to(dtype).transpose(0, 1)
    ends = torch.tensor(lengths)
    there = query.to(device), layer.blocks.to(device), table.to(device), ends.to(device)

    def run(query, blocks, table, ends):
        return kernel(query, blocks, width, table, ends, 0.25, window).cpu()

    found = run(*there)
    assert found.shape == (len(chunks), heads, value_width)
    assert found.dtype == dtype
    for row, chunk in enumerate(chunks):
        expected = by_itself(cache, chunk, query[row][:, None], window, 0.25)[0]
        torch.testing.assert_close(found[row].double(), expected, rtol=tolerance, atol=tolerance)
    wider = torch.cat((there[2], there[2].new_zeros(len(chunks), 40)), 1)
    assert torch.equal(run(there[0], there[1], wider, there[3]), found)
    for row in (0, len(chunks) - 1):
        one = slice(row, row + 1)
        assert torch.equal(run(there[0][one], there[1], there[2][one].contiguous(), there[3][one]), found[one])
