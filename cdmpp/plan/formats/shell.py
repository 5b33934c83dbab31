"""Launch scripts of bash: their commands with variables, arrays and arithmetic expanded. Nothing is executed."""

from __future__ import annotations

import ast
import bisect
import operator
import re
from collections.abc import Callable
from typing import Any

from cdmpp.errors import FieldError

#: Characters of a script, and of all its expansions.
MAX_TEXT = 1_000_000
_MAX_DEPTH, _MAX_ARITHMETIC = 20, 1000
_NAME = r"[A-Za-z_]\w*"
_BLANKS = re.compile(r"(?:[ \t]|\\\n)*")
_COMMENT = re.compile(r"[^\n]*")
_GAP = re.compile(r"(?:\s|\\\n|#.*)*")
_PLAIN = re.compile(r"[^\\\"'$`\s;&|<>()]+|.", re.DOTALL)
_OPERATOR = re.compile(r"\n|;;?&?|&&|\|\|?&?|&|[()]")
_REDIRECTION = re.compile(r"\d*(&>>?|<<-?(?!<)|<<<|[<>]+[&|]?)[ \t]*")
_KEYWORD = re.compile(
    r"(if|elif|else|then|fi|for|while|until|do|done|case|esac|select|time|[{}!])(?=[\s;&|()]|$)(?:\s+(?<=for )(\w+))?"
)
_FUNCTION = re.compile(r"(?:function\s+([\w:.-]+)(?:\s*\(\s*\))?|([\w:.-]+)\s*\(\s*\))\s*\{")
_ASSIGNMENT = re.compile(rf"({_NAME})(\[[^\]\s]*\])?(\+?)=")
_PARAMETER = re.compile(rf"\$({_NAME}|[\d@*#?$!-])")
_FORM = re.compile(rf"({_NAME}|\d+)(?:\[([@*]|\d+)\])?(?:(:?[-=+?])(.*))?", re.DOTALL)
_DECLARING = ("export", "declare", "local", "readonly", "typeset")
_SETTING = ("read", "mapfile", "readarray", "getopts", "let", "unset", "printf")
_TESTS = ("[", "[[", "((", "test")
_NO_LAUNCH = {*_DECLARING, *_SETTING, *_TESTS, "echo", "set", "cd", "mkdir", "source", ".", "sleep", "ulimit"}
#: Files of `source` that set no arguments of a launch.
_HARMLESS = re.compile(r"[ /](activate|conda\.sh|\.?bashrc|\.?(bash_)?profile)$")
_TOKEN = re.compile(r"[\w#]+", re.ASCII)
#: Separates fields; encloses the number of an expansion that is not known.
_SEPARATOR, _MARK = "\ue002", re.compile("\ue000(\\d+)\ue001")


class Unknown(str):
    """A word of which a part cannot be expanded, as it stands in the script."""

    why: str  # the part, its line, and the reason
    whole: bool  # nothing else is in the word: it may stand for any number of words

    def __new__(cls, text: str, why: str, whole: bool = False) -> Unknown:
        """A word with its reason."""
        word = super().__new__(cls, text)
        word.why, word.whole = why, whole
        return word


def known(value: Any, path: str) -> Any:
    """The value; ``FieldError`` where it is :class:`Unknown`."""
    if isinstance(value, Unknown):
        raise FieldError.at(path, value.why, hint="assign it in the text, or write the value itself")
    return value


#: Words of a command, and the condition, loop or function that decides whether it runs (empty: none).
Command = tuple[list[str], str]


def commands(text: str) -> list[Command]:
    """The commands of a script that is run without arguments; of a text of assignments alone, the words it assigns.

    Raises FieldError: a quotation or bracket has no end, or the text or its expansions exceed :data:`MAX_TEXT`.
    """
    script = _Script(text.replace("\r\n", "\n"), {}, [])
    expanded = script.commands()
    if not expanded:
        values = [word for value in script.variables.values() for item in _listed(value) for word in item.split()]
        expanded = [(values, "")] if values else []
    return [([script.resolved(word) for word in words], block) for words, block in expanded]


class _Script:
    """State of the reader. Values contain a mark for each part that is not known."""

    def __init__(self, text: str, variables: dict[str, str | list[str]], parts: list[tuple[str, str]]) -> None:
        self._text, self._at, self._spent, self._depth = text, 0, 0, 0
        self._spend(len(text))
        self.variables, self._parts = variables, parts
        self._newlines = [match.start() for match in re.finditer("\n", text)]
        self._blocks: list[str] = []
        self._guard = self._sourced = ""

    def commands(self) -> list[Command]:
        finished: list[Command] = []
        words: list[str] = []
        documents: list[str] = []
        outside: list[tuple[int, dict[str, str | list[str]], str]] = []
        skip = assigned = False
        while True:
            text = self._text
            self._at = _BLANKS.match(text, self._at).end()  # type: ignore[union-attr]  # it matches ""
            rest = text[self._at : self._at + 2]
            if rest[:1] == "#":
                self._at = _COMMENT.match(text, self._at).end()  # type: ignore[union-attr]  # it matches ""
            elif match := _REDIRECTION.match(text, self._at):
                self._at = match.end()
                target = self._word(False)
                if match[1] in ("<<", "<<-"):
                    documents.append(target)
            elif not words and rest in ("((", "[["):
                end = text.find({"((": "))", "[[": "]]"}[rest], self._at)
                for name in re.findall(rf"({_NAME})\s*(?:[-+*/]?=(?!=)|\+\+|--)", text[self._at : end]):
                    self.variables[name] = self._mark(f"${name}", "arithmetic assigns it")
                words, self._at = [rest], (end + 2 if end >= 0 else len(text))
            elif not rest or (match := _OPERATOR.match(text, self._at)):
                sign = match[0] if rest and match else ""
                if words and not skip:
                    finished += self._finished(words)
                if sign == "(":
                    self._spend(len(self.variables))
                    self._blocks.append(self._guard)
                    outside.append((len(self._blocks), dict(self.variables), self._sourced))
                elif sign == ")" and outside and outside[-1][0] == len(self._blocks):
                    self._blocks.pop()
                    _, self.variables, self._sourced = outside.pop()
                if words or assigned or sign != "\n":
                    self._guard = self._guarded(sign, words)
                words, skip, assigned = [], False, False
                if not rest:
                    return finished
                self._at += len(sign)
                while sign == "\n" and documents:
                    last = re.compile(rf"^\t*{re.escape(documents.pop(0))}$", re.MULTILINE).search(text, self._at)
                    self._at = last.end() if last else len(text)
            elif not words and (match := _FUNCTION.match(text, self._at)):
                self._blocks.append(f"the function {match[1] or match[2]}")
                self._at = match.end()
            elif not words and (match := _KEYWORD.match(text, self._at)):
                skip = self._keyword(match[1], match[2])
                self._at = match.end()
            elif (not words or words[0] in _DECLARING) and (match := _ASSIGNMENT.match(text, self._at)):
                self._assign(match)
                assigned = True
            else:
                words += filter(None, self._word(True).split(_SEPARATOR))

    def resolved(self, word: str) -> str:
        """A word as text, or as :class:`Unknown`."""
        marks = _MARK.findall(word)
        if not marks:
            return word
        text = _MARK.sub(lambda mark: self._parts[int(mark[1])][0], word)
        return Unknown(text, self._parts[int(marks[0])][1], not _MARK.sub("", word))

    def _finished(self, words: list[str]) -> list[Command]:
        if words[0] in _SETTING:
            for match in filter(None, (re.match(_NAME, word) for word in words[1:])):
                self.variables[match[0]] = self._mark(f"${match[0]}", f"`{words[0]}` sets it")
        if words[0] in ("source", ".") and not _HARMLESS.search(" ".join(words[:2])):
            self._sourced = f"`{self.resolved(' '.join(words))[:80]}` (line {self._line()}) may set it"
            self._spend(len(self.variables))
            self.variables = {name: self._mark(f"${name}", self._sourced) for name in self.variables}
        if words[0] in _NO_LAUNCH:
            return []
        at = next((k for k in range(2, len(words)) if words[k - 1] in ("-c", "-lc") and words[k - 2][-2:] == "sh"), 0)
        if at and self._depth < _MAX_DEPTH:
            self._spend(len(self.variables))
            inner = _Script(words[at], dict(self.variables), self._parts)
            inner._depth, inner._spent, inner._sourced = self._depth + 1, self._spent, self._sourced
            finished = [(inside, block or self._block()) for inside, block in inner.commands()]
            self._spent = inner._spent
            return finished
        return [(words, self._block())]

    def _guarded(self, sign: str, words: list[str]) -> str:
        """What decides whether the command after an operator runs."""
        if sign[:1] == "|" or (sign == "&&" and (self._guard or (words and words[0] in _TESTS))):
            return self._guard or f"the `{sign}` of line {self._line()}"
        return ""

    def _block(self) -> str:
        return next(filter(None, reversed(self._blocks)), self._guard)

    def _keyword(self, word: str, variable: str | None) -> bool:
        """Enter or leave a block; whether the words that follow are no command."""
        if word in ("if", "for", "while", "until", "case", "select", "{"):
            self._blocks.append(self._guard if word == "{" else f"the `{word}` of line {self._line()}")
        elif word in ("fi", "done", "esac", "}") and self._blocks:
            self._blocks.pop()
        if variable:
            self.variables[variable] = self._mark(f"${variable}", f"{self._blocks[-1]} decides it")
        return word in ("for", "case", "select")

    def _assign(self, match: re.Match[str]) -> None:
        name, index, plus = match.groups()
        self._at = match.end()
        value: str | list[str]
        if self._text[self._at : self._at + 1] == "(":
            self._at, value = self._at + 1, []
            while True:
                self._at = begin = _GAP.match(self._text, self._at).end()  # type: ignore[union-attr]
                if self._text.startswith(")", begin):
                    break
                value += filter(None, self._word(True).split(_SEPARATOR))
                if self._at == begin:
                    raise self._open("(")
            self._at += 1
        else:
            value = self._word(False)
        before = self._value(name) or ("" if isinstance(value, str) else [])
        if self._block() or index:
            value = self._mark(f"${name}", f"{self._block() or 'an index'} decides it")
        elif plus and isinstance(before, list):
            value = before + (value if isinstance(value, list) else [value])
        elif plus:
            value = f"{before}{value}" if isinstance(value, str) else [str(before), *value]
        self._spend(sum(map(len, value)))
        self.variables[name] = value

    def _word(self, split: bool) -> str:
        """The word at the current place; its fields are separated where it is split."""
        value, self._at = self._expanded(self._text, self._at, " \t\n;&|<>()", False, split)
        return value

    def _expanded(self, text: str, at: int, stop: str, quoted: bool, split: bool) -> tuple[str, int]:
        out = []
        while at < len(text) and text[at] not in stop:
            character, following = text[at], text[at + 1 : at + 2]
            if character == "\\":
                if following != "\n":
                    out.append(following if not quoted or following in '"\\$`' else character + following)
                at += 2
            elif character == '"' and not quoted:
                inner, at = self._expanded(text, at + 1, '"', True, split)
                if at >= len(text):
                    raise self._open(character)
                out.append(inner)
                at += 1
            elif character == "'" and not quoted:
                end = text.find("'", at + 1)
                if end < 0:
                    raise self._open(character)
                out.append(text[at + 1 : end])
                at = end + 1
            elif character in "$`":
                value, at = self._expand(text, at)
                joined = value if isinstance(value, str) else (_SEPARATOR if split else " ").join(value)
                out.append(re.sub(r"[ \t\n]+", _SEPARATOR, joined) if split and not quoted else joined)
                self._spend(len(joined))
            else:
                out.append(_PLAIN.match(text, at)[0])  # type: ignore[index]  # it matches any character
                at += len(out[-1])
        return "".join(out), at

    def _expand(self, text: str, at: int) -> tuple[str | list[str], int]:
        """The value of the expansion at a place, and its end."""
        if text[at] == "`":
            end = text.find("`", at + 1) + 1 or len(text)
            return self._mark(text[at:end], "it is the output of a command"), end
        if parameter := _PARAMETER.match(text, at):
            return self._parameter(parameter[1], parameter[0]), parameter.end()
        bracket = text[at + 1 : at + 2] or " "
        if bracket not in "({":
            return ("" if bracket in "'\"" else "$"), at + 1
        depth = 0
        for match in re.compile(r"[()]" if bracket == "(" else r"[{}]").finditer(text, at):
            depth += 1 if match[0] == bracket else -1
            if not depth:
                break
        else:
            raise self._open(f"${bracket}")
        raw = text[at : match.end()]
        if bracket == "{":
            return self._parameter(raw[2:-1], raw), match.end()
        if raw.startswith("$((") and raw.endswith("))"):
            return self._arithmetic(raw[3:-2], raw), match.end()
        return self._mark(raw, "it is the output of a command"), match.end()

    def _value(self, name: str) -> str | list[str] | None:
        if self._sourced and name not in self.variables and not name.isdigit():
            return self._mark(f"${name}", self._sourced)
        return self.variables.get(name)

    def _parameter(self, inner: str, raw: str) -> str | list[str]:
        if inner in ("@", "*"):
            return []
        form = _FORM.fullmatch(inner)
        if form is None:
            return self._mark(raw, "this form of expansion is not read")
        name, index, change, other = form.groups()
        value = self._value(name)
        if isinstance(value, list) and index not in ("@", "*"):
            value = value[int(index or 0)] if int(index or 0) < len(value) else None
        is_set = value is not None and not (change and change[0] == ":" and not value)
        if change and (change[-1] == "+" if is_set else change[-1] in "-="):
            value = self._nested(other, False)
            if change[-1] == "=":
                self.variables[name] = value
        elif change and change[-1] == "+":
            value = ""
        if value is None:
            what = f"argument {name} of the script has no default" if name.isdigit() else f"{name} is not assigned"
            return self._mark(raw, what)
        return value

    def _nested(self, text: str, quoted: bool) -> str:
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise FieldError(f"line {self._line()}: expansions are nested too deeply", hint="write the value itself")
        value, _ = self._expanded(text, 0, "", quoted, False)
        self._depth -= 1
        return value

    def _arithmetic(self, inner: str, raw: str) -> str:
        text = self._nested(inner.replace('"', ""), True)
        try:
            for _ in range(_MAX_DEPTH):
                if len(text) < _MAX_ARITHMETIC:
                    text = _TOKEN.sub(self._operand, text)
            if mark := _MARK.search(text):
                return mark[0]
            return str(_whole(ast.parse(text.strip() if len(text) < _MAX_ARITHMETIC else "", mode="eval").body))
        except (ValueError, SyntaxError, ZeroDivisionError, RecursionError, MemoryError):
            return self._mark(raw, "this arithmetic is not read")

    def _operand(self, token: re.Match[str]) -> str:
        """A variable or number of bash (12, 0x1F, 017, 16#1F) as Python reads it."""
        if re.fullmatch(_NAME, token[0]):
            return f"({self._parameter(token[0], f'${token[0]}')})"
        base, _, digits = token[0].lower().rpartition("#")
        implied = 16 if digits[:2] == "0x" else 8 if digits[:1] == "0" else 10
        return str(int(digits, int(base) or 1 if base else implied))  # base 0 is an error of bash

    def _mark(self, raw: str, why: str) -> str:
        shown = " ".join(_MARK.sub(lambda mark: self._parts[int(mark[1])][0], raw)[:80].split())
        self._parts.append((shown, f"`{shown}` (line {self._line()}) cannot be expanded: {why}"))
        return f"\ue000{len(self._parts) - 1}\ue001"

    def _line(self) -> int:
        return bisect.bisect_left(self._newlines, self._at) + 1

    def _open(self, what: str) -> FieldError:
        return FieldError(f"the text is no shell line: {what} of line {self._line()} has no end", hint="close it")

    def _spend(self, characters: int) -> None:
        self._spent += characters
        if self._spent > MAX_TEXT:
            raise FieldError(
                f"the script has more than {MAX_TEXT:,} characters with its expansions", hint="give its arguments alone"
            )


def _listed(value: str | list[str]) -> list[str]:
    return value if isinstance(value, list) else [value]


def _quotient(a: int, b: int) -> int:
    return a // b if (a < 0) == (b < 0) else -(-a // b)


_OPERATIONS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: _quotient,
    ast.Mod: lambda a, b: a - b * _quotient(a, b),
    ast.Pow: operator.pow,
    ast.LShift: operator.lshift,
    ast.RShift: operator.rshift,
}


def _whole(node: ast.expr) -> int:
    """Value of an expression of bash: whole numbers of 64 bits, division towards zero; else ``ValueError``."""
    result = 1 << 63
    if isinstance(node, ast.Constant) and type(node.value) is int:
        result = node.value
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        result = -_whole(node.operand)
    elif isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
        left, right = _whole(node.left), _whole(node.right)
        if not isinstance(node.op, ast.Pow | ast.LShift | ast.RShift) or 0 <= right < 64:
            result = _OPERATIONS[type(node.op)](left, right)
    if not -(1 << 63) <= result < 1 << 63:
        raise ValueError
    return result
