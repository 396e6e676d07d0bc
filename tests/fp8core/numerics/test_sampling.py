import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fp8core.numerics.logprobs import greedy, sample, uniform

LARGEST = 1 - 2.0**-53

# The first outputs of Vigna's splitmix64.c from the seed 1234567.
PUBLISHED = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431, 16408922859458223821]


def splitmix64(seed: int, count: int) -> list[int]:
    state, outputs = seed % 2**64, []
    for _ in range(count):
        state = (state + 0x9E3779B97F4A7C15) % 2**64
        z = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
        outputs.append(z ^ z >> 31)
    return outputs


def logprobs_of(*probabilities: float) -> Tensor:
    return torch.tensor([probabilities], dtype=torch.float64).log()


def draw(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_draws_are_the_published_outputs() -> None:
    assert splitmix64(1234567, 5) == PUBLISHED
    for position, output in enumerate(PUBLISHED):
        assert uniform(torch.tensor([1234567]), position).item() == (output >> 11) * 2.0**-53


@given(
    weights=st.lists(st.one_of(st.just(0.0), st.floats(1e-12, 1.0)), min_size=1, max_size=30).filter(any),
    value=st.one_of(st.sampled_from([0.0, LARGEST]), st.floats(0, LARGEST)),
)
@settings(max_examples=150)
def test_any_draw_chooses_a_token_with_probability(weights: list[float], value: float) -> None:
    total = sum(weights)
    logprobs = logprobs_of(*(weight / total for weight in weights))
    token = sample(logprobs, draw(value)).item()
    assert weights[token] > 0
    below = sum(weights[:token]) / total
    assert below - 1e-9 <= value <= below + weights[token] / total + 1e-9


def test_the_edges_choose_the_first_and_the_last_token_with_probability() -> None:
    logprobs = logprobs_of(0.0, 0.1, 0.2, 0.7, 0.0).expand(2, 5)
    assert sample(logprobs, draw(0.0, LARGEST)).tolist() == [1, 3]
    # Beyond the last token, probabilities too small to move the cumulative sum.
    tail = torch.tensor([[0.5, 0.5, 1e-30, 1e-30]], dtype=torch.float64).log()
    assert sample(tail, draw(LARGEST)).item() == 1


def test_a_choice_does_not_depend_on_its_batch() -> None:
    generator = torch.Generator().manual_seed(2)
    logprobs = torch.log_softmax(3 * torch.randn(64, 1000, generator=generator).double(), dim=-1)
    draws = uniform(torch.arange(64), 0)
    whole = sample(logprobs, draws)
    for rows in (*torch.arange(64).split(1), torch.arange(20, 27), torch.randperm(64, generator=generator)):
        assert torch.equal(sample(logprobs[rows], draws[rows]), whole[rows])


def test_greedy_takes_the_first_of_the_most_likely() -> None:
    logprobs = torch.tensor([[-2.0, -1.0, -1.0], [-0.5, -3.0, -1.0]], dtype=torch.float64)
    assert greedy(logprobs).tolist() == [1, 0]
    assert greedy(torch.zeros(3, 1000)).tolist() == [0, 0, 0]
