"""What a rounding of attention does to random weights."""

import torch

from benchmarks.quality import random_windows, rounding


def test_noise_is_in_attention_and_nowhere_else_without_it():
    noise = rounding.Noise()
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
    assert noise(None, (x,)) is None
    noise.level = 2.0**-8
    (moved,) = noise(None, (x,))
    change = ((moved - x) / x).abs()
    assert 0 < change.max() < 5 * noise.level and change.mean() > noise.level / 4


def test_more_noise_moves_log_probabilities_further():
    texts = [[i % 8000 for i in range(3, 603, 7)], [5, 9, 2]]
    few, many = rounding.measure(random_windows.make_gemma3, texts, [0.5, 64])
    assert few[:2] == ["0.5", str(len(texts[0]) + 1)] and many[0] == "64"
    assert 0 < float(few[2]) < float(many[2]) and float(few[2]) <= float(few[3])
