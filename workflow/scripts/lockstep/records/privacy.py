"""Removes from files what tells whose machine it was: folders, hosts, addresses, secrets, and texts to predict.

JSON and YAML are cleaned by value, so that their keys and their structure stay. A path keeps its last name where that
has a suffix, since a configuration is not understood without the names of its files. Nothing can find every name in
free text, so whoever shares a record should look through it: `tar -xJf` unpacks one.
"""

import json
import platform
import re
from collections import Counter
from pathlib import PurePosixPath

import yaml

from lockstep.errors import BadInput

PATH, HOST, TEXT, SECRET, ADDRESS, URL = "<path>", "<host>", "<text>", "<secret>", "<address>", "<url>"
MARKS = (PATH, HOST, TEXT, SECRET, ADDRESS, URL)
HOST_KEYS = ("host", "hosts", "address", "endpoint", "interface")
OF_EVERY_MACHINE = (
    "/usr/bin/",
    "/usr/lib/",
    "/usr/include/",
    "/usr/local/",
    "/bin/",
    "/lib/",
    "/proc/",
    "/sys/",
    "/opt/rh/",
)
LOOPBACK = ("127.0.0.1", "localhost", "::1")
EVERYWHERE = (*LOOPBACK, "lo", "auto", "root", "")  # values of HOST_KEYS that tell nobody's

WHOLE_PATH = re.compile(r"(?:file:(?://)?)?(?:~|[A-Za-z]:)?(?:[\\/](?![\\/])|\\\\|~)[^\n]*")
QUOTED = re.compile(r"(?<=')~?/(?!/)[^'\n]+/[^'\n]*(?=')|(?<=\")~?/(?!/)[^\"\n]+/[^\"\n]*(?=\")")
# A path in the braces of YAML, as of `--config 'data={path: /home/me/my texts/a.csv}'`, where it may contain blanks.
BRACED = re.compile(r"(?<=[:\[,] )~?/(?!/)[^,\]}\n'\"]+/[^,\]}\n'\"]*(?=[,\]}])")
END = r"\s\"'`:;,)\]}<>|"
WITHIN = re.compile(
    rf"(?:(?<![A-Za-z0-9_.<>/~\\-])|(?<=-[IL]))(?:file:)?(?:~|[A-Za-z]:|\\)?[\\/](?![\\/\s])(?:[^{END}\\/]+[\\/])+[^{END}\\/]*"
)
UPWARD = re.compile(r"(?:\.\./)+(?:[^\s\"'/]+/)*")
LINK = re.compile(r"\b([a-z][a-z0-9+.-]*)://([^\s\"'<>]*)")
SUFFIXES = (
    ".py",
    ".yaml",
    ".yml",
    ".json",
    ".jsonl",
    ".csv",
    ".tsv",
    ".txt",
    ".parquet",
    ".zip",
    ".gz",
    ".sh",
    ".toml",
)
SUFFIXES += (".so", ".pt", ".bin", ".safetensors", ".log", ".md")
SET = re.compile(r"""\b(texts|prompt)(['"]?\s*[:=]\s*)(\[[^\]]*\]|"[^"]*"|'[^']*')""")
SET_HOST = re.compile(
    r"""\b(hosts|hostname|HOSTNAME|endpoint|interface)(['"]?\s*[:=]\s*)(\[[^\]]*\]|"[^"]*"|'[^']*'|[^\s,'"}]+)"""
)
KEPT_SECRET = re.compile(r"(?i)\b(\w*(?:key|token|password|secret))(=)[^\s'\"]+")
# In a text of JSON or Python; a count of tokens is none.
SET_SECRET = re.compile(
    r"""(?i)\b(\w*(?:password|secret|(?:api|access|auth)_?(?:key|token)))(['"]?\s*:\s*)(?:"[^"]*"|'[^']*'|[^\s,'"}]+)"""
)
BEARER = re.compile(r"(?i)\b(bearer)(\s+)[\w.~+/=-]{8,}")
SET_USER = re.compile(r"\b(USER|LOGNAME|USERNAME)(=)[^\s'\"]+")
# Unique local, link-local and global addresses of IPv6 (RFC 4291), which begin so; C++ has colons, too.
IPV6 = re.compile(r"(?i)(?<![\w:])(?:fe80|f[cd][0-9a-f]{2}|2[0-9a-f]{3}):[0-9a-f:]*:[0-9a-f]{1,4}(?![\w:])")
NUMBERED = re.compile(r"(?<![\d.])(?!127\.|0\.0\.0\.0)\d{1,3}(?:\.\d{1,3}){3}(?![\d.])")
OF_A_USER = re.compile(r"(?<![\w/])~[A-Za-z_][\w.-]*(?:/[^\s'\"]*)?")
SECRETS = re.compile(
    r"\b(?:glpat-[\w-]{8,}|hf_[A-Za-z0-9]{8,}|AKIA[0-9A-Z]{12,}|gh[pousr]_[A-Za-z0-9]{16,}|sk-[A-Za-z0-9-]{16,})"
)
MAIL = re.compile(r"[A-Za-z][\w.+-]*@(?:[A-Za-z][\w.-]*|\d{1,3}(?:\.\d{1,3}){3})")


class Names:
    """What is removed from the files of one record. `removed` counts it by mark."""

    def __init__(self, with_host: bool):
        self.with_host = with_host
        self.hosts: set[str] = set() if with_host else set(filter(_tells, [platform.node()]))
        self.removed: Counter[str] = Counter()

    def learn(self, name: str, content: bytes) -> None:
        """Note the hosts that a file names, so that they are found in other files, too."""
        if not self.with_host and name.endswith((".json", ".yaml")):
            self._learn(_read(name, content))

    def clean(self, name: str, content: bytes) -> bytes:
        """A file without them; the same bytes if there were none. Raises BadInput if it is damaged."""
        kind = PurePosixPath(name).suffix
        if kind == ".jsonl":
            lines = [line for line in _decoded(name, content).split("\n") if line]
            return b"".join(self._as_json(name, line.encode(), indent=None).rstrip(b"\n") + b"\n" for line in lines)
        if kind == ".json":
            return self._as_json(name, content, indent=1)
        if kind == ".yaml":
            return self._as_yaml(name, content)
        text = _decoded(name, content)
        cleaned = self.text(text)
        return content if cleaned == text else cleaned.encode()

    def text(self, text: str) -> str:
        """A text without them."""
        if WHOLE_PATH.fullmatch(text):
            return self._path(text)
        text = LINK.sub(self._link, text)
        text = SET.sub(lambda match: f"{match[1]}{match[2]}{self._mark(TEXT)}", text)
        for pattern in (KEPT_SECRET, SET_SECRET, BEARER):
            text = pattern.sub(lambda match: f"{match[1]}{match[2]}{self._mark(SECRET)}", text)
        text = SET_USER.sub(lambda match: f"{match[1]}{match[2]}{self._mark(ADDRESS)}", text)
        text = MAIL.sub(lambda _: self._mark(ADDRESS), text)
        if not self.with_host:
            text = SET_HOST.sub(lambda match: f"{match[1]}{match[2]}{self._mark(HOST)}", text)
            for pattern in (NUMBERED, IPV6):
                text = pattern.sub(lambda _: self._mark(HOST), text)
        for pattern, mark in ((SECRETS, SECRET), (OF_A_USER, PATH)):
            text = pattern.sub(lambda _, mark=mark: self._mark(mark), text)
        for pattern in (QUOTED, BRACED, WITHIN):
            text = pattern.sub(lambda match: self._path(match[0]), text)
        text = UPWARD.sub(lambda _: self._mark(PATH) + "/", text)
        for host in self.hosts:
            text = re.sub(rf"(?<![\w-]){re.escape(host)}(?![\w-])", lambda _: self._mark(HOST), text)
        return text

    def _as_json(self, name: str, content: bytes, indent: int | None) -> bytes:
        value = _read(name, content)
        cleaned = self._value(value)
        if cleaned == value:
            return content
        return (json.dumps(cleaned, ensure_ascii=False, indent=indent) + "\n").encode()

    def _as_yaml(self, name: str, content: bytes) -> bytes:
        value = _read(name, content)
        cleaned = self._value(value)
        return content if cleaned == value else yaml.safe_dump(cleaned, allow_unicode=True, sort_keys=False).encode()

    def _value(self, value, key: str = ""):
        if isinstance(value, dict):
            cleaned = {self._name(name): self._value(each, name) for name, each in value.items()}
            if key == "predict" and isinstance(cleaned.get("texts"), list):
                cleaned["texts"] = [self._mark(TEXT) for _ in cleaned["texts"]]
            return cleaned
        if isinstance(value, list):
            return [self._value(each, key) for each in value]
        if not isinstance(value, str):
            return value
        of_a_host = key in HOST_KEYS or str(key).endswith("_SOCKET_IFNAME")
        if of_a_host and not self.with_host and value not in EVERYWHERE:
            return self._mark(HOST)
        return self.text(value)

    def _name(self, name):
        """A key, which is cleaned if it is a path, as in data.files."""
        return self.text(name) if isinstance(name, str) and "/" in name else name

    def _learn(self, value, key: str = "") -> None:
        if isinstance(value, dict):
            for name, each in value.items():
                self._learn(each, name)
        elif isinstance(value, list):
            for each in value:
                self._learn(each, key)
        elif isinstance(value, str) and key in ("host", "hosts", "address") and value not in EVERYWHERE:
            parts = {value} if value[:1].isdigit() else {value, value.partition(".")[0]}
            self.hosts |= set(filter(_tells, parts))

    def _path(self, path: str) -> str:
        if path.startswith(OF_EVERY_MACHINE) or path in ("/", "~"):
            return path
        last = re.split(r"[\\/]", path.rstrip("\\/"))[-1]
        mark = self._mark(PATH)
        return f"{mark}/{last}" if PurePosixPath(last).suffix in SUFFIXES else mark

    def _link(self, match: re.Match) -> str:
        scheme, rest = match.groups()
        if scheme == "file":
            return self._path("/" + rest.lstrip("/"))
        host, slash, path = rest.partition("/")
        bare = host.rpartition("@")[2]
        if bare.rpartition(":")[0] in LOOPBACK or bare in LOOPBACK:
            return match[0]
        if scheme not in ("http", "https"):
            return self._mark(URL)
        kept = f"{scheme}://{bare}{slash}{re.split('[?#]', path)[0]}"
        return kept if kept == match[0] else f"{kept}{self._mark(SECRET)}"

    def _mark(self, mark: str) -> str:
        self.removed[mark] += 1
        return mark


def _tells(host: str) -> bool:
    """Whether a host's name can be looked for in texts: a plain word may mean something else there, as `cpu` does."""
    return re.search(r"[\d.-]", host) is not None and host not in EVERYWHERE


def _decoded(name: str, content: bytes) -> str:
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError:
        raise BadInput(f"{name}: is damaged, as it is not UTF-8.") from None


def _read(name: str, content: bytes):
    text = _decoded(name, content)
    try:
        return yaml.safe_load(text) if name.endswith(".yaml") else json.loads(text)
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        raise BadInput(f"{name}: is damaged ({error}).") from None
