"""Windows with stretches of random tokens: some of a window stays text, no special token comes in."""

from test_families import Words

from sparsekv.corpus import add_noise, make_windows, read_documents


class Vocabulary(Words):
    all_special_ids = (0, 1, 2)

    def __len__(self) -> int:
        return 50_000


def test_noise_replaces_half_of_the_first_windows() -> None:
    tokenizer = Vocabulary()
    clean = make_windows(read_documents("embedded"), tokenizer, length=4000, count=4)
    noisy = add_noise(clean, 3, tokenizer, seed=1)
    assert noisy[3] == clean[3] and noisy == add_noise(clean, 3, tokenizer, seed=1)
    assert noisy != add_noise(clean, 3, tokenizer, seed=2)
    changed = [sum(a != b for a, b in zip(n.tokens, c.tokens, strict=True)) for n, c in zip(noisy, clean, strict=True)]
    assert 0.4 < sum(changed) / 12_000 < 0.6 and min(changed[:3]) > 1000
    drawn = {a for n, c in zip(noisy, clean, strict=True) for a, b in zip(n.tokens, c.tokens, strict=True) if a != b}
    assert min(drawn) > 2 and max(drawn) > 45_000 and noisy[0].sha256 != clean[0].sha256
    assert add_noise(clean, 0, Words()) is clean
