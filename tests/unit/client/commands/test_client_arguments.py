"""Arguments that can't be meant are refused before anything is asked."""

from __future__ import annotations

import pytest

from rollout_client.commands.rollout_command import make_parser


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("generate", "p", "text", "--temperature", "nan"), "at least 0, such as 0.7, not 'nan'"),
        (("generate", "p", "text", "--temperature", "-1"), "at least 0"),
        (("generate", "p", "text", "--temperature", "hot"), "at least 0"),
        (("generate", "p", "\udcff"), "argument TEXT: give it as UTF-8"),
        (("generate", "p", "text", "--adapter", "\udcff"), "--adapter: give it as UTF-8"),
        (("publish", "p", "\udcff"), "argument PATH: give it as UTF-8"),
        (("publish", "p", "--version", "9" * 20), "give at most 9007199254740991"),
    ],
)
def test_what_is_wrong_with_an_argument_is_said(
    words: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        make_parser("rollout").parse_args(words)
    assert ended.value.code == 2
    assert said in capsys.readouterr().err
