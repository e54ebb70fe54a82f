"""What the readers of graphs and kernels have in common: tokens, and errors that say line and column."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import ClassVar, NoReturn

from hotfuse.base.errors import ModelError
from hotfuse.ir import dims
from hotfuse.ir.dims import Dim, unquote

BLANK = " \t\r\n"


class TokenReader:
    """Reads by recursive descent over a list of tokens; a place in the text is only worked out for an error."""

    __slots__ = ("at", "text", "tokens")

    subject: ClassVar[str]
    """What the text is of."""
    lexemes: ClassVar[re.Pattern[str]]
    """Blanks and a token, comments among them."""
    names: ClassVar[re.Pattern[str]]
    """Words that need no quotes."""

    def __init__(self, text: str) -> None:
        self.text = text
        found: list[str] = self.lexemes.findall(text.rstrip(BLANK))  # no match is tried over the last blanks again and again
        if "#" in text:
            found = [t for t in found if t[0] != "#"]
        self.tokens = [*found, "", "", ""]
        self.at = 0

    def _places(self) -> Iterator[int]:
        return (m.start(1) for m in self.lexemes.finditer(self.text.rstrip(BLANK)) if m.group(1)[0] != "#")

    def fail(self, what: str, at: int | None = None, cause: Exception | None = None) -> NoReturn:
        """An error that shows where."""
        at = self.at if at is None else at
        token = self.tokens[at]
        place = next((p for i, p in enumerate(self._places()) if i == at), len(self.text))
        line = self.text.count("\n", 0, place) + 1
        column = place - self.text.rfind("\n", 0, place)
        found = f"found {token[:60]!r}" if token else "found the end of the text"
        raise ModelError(
            f"malformed {self.subject} text: {what}", where=f"line {line}, column {column}", because=found
        ) from cause

    @property
    def token(self) -> str:
        """The next token; empty at the end."""
        return self.tokens[self.at]

    def local_name(self, what: str) -> str:
        """The name in `%name`, quoted or not, of what the text defines."""
        token = self.tokens[self.at]
        if token[:1] != "%" or len(token) < 2:
            self.fail(f"a {what}, %name, expected")
        try:
            name = token[1:] if token[1] != '"' else unquote(token[1:])
        except ValueError as e:
            self.fail(str(e), cause=e)
        self.at += 1
        return name

    def end(self, what: str) -> None:
        """Nothing may follow."""
        if self.token:
            self.fail(f"text after the end of the {what}")

    def accept(self, want: str) -> bool:
        """Whether it comes next; then it is read."""
        if self.tokens[self.at] == want:
            self.at += 1
            return True
        return False

    def expect(self, want: str) -> None:
        """It must come next."""
        if self.tokens[self.at] != want:
            self.fail(f"{want!r} expected")
        self.at += 1

    def string(self) -> str:
        """Text in quotes."""
        try:
            text = unquote(self.tokens[self.at])
        except ValueError as e:
            self.fail(str(e), cause=e)
        self.at += 1
        return text

    def word(self) -> str:
        """A plain word, or any in quotes."""
        token = self.tokens[self.at]
        if token[:1] == '"':
            return self.string()
        if not self.names.fullmatch(token):
            self.fail("a name expected")
        self.at += 1
        return token

    def integer(self) -> int:
        """A whole number."""
        try:
            number = int(self.tokens[self.at])
        except ValueError as e:
            self.fail("an integer expected", cause=e)
        self.at += 1
        return number

    def dim(self) -> Dim:
        """A size: mostly a number, else an expression."""
        token = self.tokens[self.at]
        if token.isdigit() and token.isascii() and len(token) < 20:
            self.at += 1
            return int(token)
        try:
            d, self.at = dims.read(self.tokens, self.at)
        except dims.DimSyntaxError as e:
            self.fail(e.what, e.at, e)
        return d
