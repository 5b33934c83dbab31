"""Networks by name: parameters, seeds, errors."""

import pytest
import torch

from cdmpp.errors import InvalidProgramError
from cdmpp.programs.zoo import describe_network, make_network, network_names, network_parameters, parse_network
from cdmpp.programs.zoo.sequences import route
from cdmpp.programs.zoo.transformers import lengths

SMALL = {
    "bert-tiny": "bert-tiny:seq=8",
    "gpt2-decode": "gpt2-decode:past=4,width=32,heads=2",
    "moe-adaptive": "moe-adaptive:tokens=8,width=16,hidden=16,second=0.5",
}


def test_names_are_unique_kebab_case_and_described() -> None:
    names = network_names()
    assert len(names) == len(set(names)) >= 28
    assert {"resnet18", "bert-tiny", "dit-3d", "gpt2-prefill", "gpt2-decode"} <= set(names)
    for name in names:
        assert name == name.lower() and "_" not in name
        assert describe_network(name) != name
        assert network_parameters(name)


@pytest.mark.parametrize("text", SMALL.values())
def test_a_text_gives_the_network_again(text: str) -> None:
    first, second = parse_network(text), parse_network(parse_network(text).text)
    assert first.text == second.text and first.parameters == second.parameters
    assert not first.module.training
    for a, b in zip(first.inputs, second.inputs, strict=True):
        assert torch.equal(a, b)
    assert torch.equal(first.module(*first.inputs), second.module(*second.inputs))


def test_making_a_network_leaves_the_global_seed_alone() -> None:
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    make_network("moe-top1", tokens=4, width=8, hidden=8)
    assert torch.equal(torch.rand(2), expected)


def test_parameters() -> None:
    made = parse_network(" bert-tiny : seq = 8 , batch=1 ")
    assert made.parameters == {"batch": 1, "seq": 8, "layers": 2} and made.changed == {"seq": 8}
    assert made.name == "bert-tiny" and made.text == "bert-tiny:seq=8"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no network is called ''"),
        ("resnet", "near it: resnext, resnet50, resnet18"),
        ("bert-tiny:", "not key=value"),
        ("bert-tiny:seq", "not key=value"),
        ("bert-tiny:seq=4,seq=4", "once each"),
        ("bert-tiny:sqe=4", "no parameter 'sqe'"),
        ("bert-tiny:seq=-1", "not a whole number"),
        ("bert-tiny:seq=4.5", "not a whole number"),
        ("bert-tiny:seq=9999999999", "not a whole number"),
        ("dsv-attention:density=0", "above 0, at most 1"),
        ("dsv-attention:density=nan", "above 0, at most 1"),
        ("gpt2-decode:heads=5", "5 does not divide 768"),
        ("moe-top2:experts=1", "two experts"),
    ],
)
def test_errors(text: str, message: str) -> None:
    with pytest.raises(InvalidProgramError, match=message) as error:
        parse_network(text)
    assert error.value.hint


def test_routing_gives_every_token_its_experts() -> None:
    torch.manual_seed(0)
    plan = route(tokens=10, experts=4, second=0.3)
    pairs = [pair for own in plan for pair in own]
    assert sorted(token for token, choice in pairs if choice == 0) == list(range(10))
    assert sum(choice for _, choice in pairs) == 3
    assert all(len({token for token, _ in own}) == len(own) for own in plan)


def test_lengths_have_the_requested_mean() -> None:
    assert lengths(4, 64, 1.0) == (64, 64, 64, 64)
    sizes = lengths(5, 100, 0.6)
    assert sizes[0] == 100 and sum(sizes) / 5 == 60
