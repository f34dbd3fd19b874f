"""The page of all messages is the source's own text."""

import pytest

from support import message_page

pytestmark = pytest.mark.usefixtures("no_garbage_collection")


def test_page_of_messages_is_that_of_the_source() -> None:
    assert message_page.PAGE.read_text() == message_page.page(), (
        "a message has changed: PYTHONPATH=tests python -m support.message_page writes the page anew"
    )


def test_page_finds_messages_with_their_way_out() -> None:
    found = {message.text: message for message in message_page.messages()}
    assert found["a cluster needs at least one node"].is_error
    unfit = found["{purpose} needs the package `{package}`, which is not installed."]
    assert unfit.hint == "pip install 'wanma[{extra}]'"
    assert any(not message.is_error for message in found.values())
