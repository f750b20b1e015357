"""A small Hugging Face hub on this machine's loopback interface, as huggingface_hub and datasets ask for it.

It serves what a test puts into it, by the requests and headers of the real one: `/api/.../revision`, `/api/.../tree`,
`/api/.../paths-info`, `/ID/resolve/REV/FILE`, from where small files and large ones are redirected to other addresses,
git's hash of a small file and the sha256 of a large one as its ETag, and `Range`. It notes every request, and can be
told to fail in the ways that hubs and networks do.
"""

import contextlib
import hashlib
import http.server
import io
import json
import re
import socket
import struct
import threading
from dataclasses import dataclass, field
from urllib.parse import parse_qs, quote, unquote, urlsplit

REPOSITORY = re.compile(r"^/api/(models|datasets)/([^/]+/[^/]+)(?:/(revision|tree|paths-info)/([^/]+)(?:/(.*))?)?$")
RESOLVE = re.compile(r"^/(datasets/)?([^/]+/[^/]+)/resolve/([^/]+)/(.+)$")
CONTENT = re.compile(r"^/(api/resolve-cache|large)/(models|datasets)/([^/]+/[^/]+)/([0-9a-f]{40})/(.+)$")


def git_hash(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def is_large(path: str) -> bool:
    """Whether the hub keeps a file in its large file storage."""
    return path.endswith((".bin", ".safetensors", ".parquet", ".h5"))


@dataclass
class Repository:
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)

    def add(self, files: dict[str, bytes], ref: str = "main") -> str:
        """A new commit with these files, to which the reference then points."""
        commit = hashlib.sha1(repr((sorted(files.items()), len(self.commits))).encode()).hexdigest()
        self.put(commit, files)
        self.refs[ref] = commit
        return commit

    def put(self, commit: str, files: dict[str, bytes]) -> None:
        self.commits[commit] = files

    def commit(self, revision: str) -> str | None:
        commit = self.refs.get(revision, revision)
        return commit if commit in self.commits else None


class Hub:
    """What is served, what goes wrong, and what was asked."""

    def __init__(self):
        self.repositories: dict[tuple[str, str], Repository] = {}
        self.requests: list[tuple[str, str, dict]] = []  # method, path, headers
        self.status = 0  # answered to every request, where it is not 0
        self.gated = ""  # the token without which no file is handed out
        self.cuts: dict[str, list[int]] = {}  # after how many bytes of a file the connection is cut, time after time
        self.resets = False  # whether a connection that is cut is reset too, as firewalls do, or just closed
        self.spoilt: dict[str, bytes] = {}  # other content of a file, than its hash is of
        self.ignores_range = False

    def model(self, name: str) -> Repository:
        return self.repositories.setdefault(("models", name), Repository())

    def data_set(self, name: str) -> Repository:
        return self.repositories.setdefault(("datasets", name), Repository())

    def asked(self, end: str = "", method: str = "") -> list[dict]:
        """The headers of all requests whose path ends like this."""
        return [headers for how, path, headers in self.requests if path.endswith(end) and method in ("", how)]

    @contextlib.contextmanager
    def running(self):
        """Serve until the block ends; `url` is where."""
        handler = type("Handler", (_Handler,), {"hub": self})
        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
        server.daemon_threads = True
        self.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        thread.start()
        try:
            yield self
        finally:
            server.shutdown()
            server.server_close()
            thread.join()


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, *_):
        pass

    def do_HEAD(self):
        self.answer()

    def do_GET(self):
        self.answer()

    def do_POST(self):
        self.body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.answer()

    def do_CONNECT(self):
        """What would go to another host, encrypted, through this one as its proxy."""
        self.hub.requests.append(
            (self.command, self.path, {name.title(): value for name, value in self.headers.items()})
        )
        self.say(502, {"error": "no way out"})

    def answer(self) -> None:
        asked = urlsplit(self.path)  # a proxy is asked for whole addresses
        path = unquote(asked.path)
        self.hub.requests.append((self.command, path, {name.title(): value for name, value in self.headers.items()}))
        if self.hub.status:
            self.say(self.hub.status, {"error": "as the test says"})
        elif match := CONTENT.match(path):
            self.content(*match.groups()[1:])
        elif match := RESOLVE.match(path):
            self.resolve("datasets" if match[1] else "models", *match.groups()[1:])
        elif match := REPOSITORY.match(path):
            self.api(*match.groups())
        elif path == "/api/agent-harnesses":  # under which the hub's library looks for itself, once a day
            self.say(200, {"standardEnvVars": [], "harnesses": {}})
        else:
            self.say(404, {"error": "Not Found"})

    def say(self, status: int, content, **headers: str) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        for name, value in {"Content-Type": "application/json", "Content-Length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def repository(self, kind: str, name: str, revision: str) -> tuple[str, dict[str, bytes]] | None:
        """The commit that a revision is, and its files; where there is none, that is said."""
        known = self.hub.repositories.get((kind, name))
        if known is None:
            known_user = "Authorization" in self.headers
            status, said = (404, "Repository not found") if known_user else (401, "Invalid username or password.")
            self.say(status, {"error": said}, X_Error_Code="RepoNotFound")
            return None
        commit = known.commit(revision)
        if commit is None:
            self.say(404, {"error": f"Invalid rev id: {revision}"}, X_Error_Code="RevisionNotFound")
            return None
        return commit, known.commits[commit]

    def api(self, kind: str, name: str, what: str | None, revision: str | None, folder: str | None) -> None:
        there = self.repository(kind, name, unquote(revision or "main"))
        if there is None:
            return
        commit, files = there
        if what == "tree":
            self.tree(files, (folder or "").strip("/"), bool(parse_qs(urlsplit(self.path).query).get("recursive")))
        elif what == "paths-info":
            wanted = parse_qs(self.body.decode()).get("paths", [])
            self.say(200, [entry(path, files[path]) for path in wanted if path in files])
        else:
            about = {"_id": "1", "id": name, "sha": commit, "private": False, "gated": bool(self.hub.gated)}
            self.say(200, about | {"tags": [], "downloads": 0, "siblings": [{"rfilename": path} for path in files]})

    def tree(self, files: dict[str, bytes], folder: str, recursive: bool) -> None:
        begin = f"{folder}/" if folder else ""
        inside = {path[len(begin) :]: path for path in files if path.startswith(begin)}
        entries = [entry(path, files[path]) for short, path in inside.items() if recursive or "/" not in short]
        folders = sorted({short.split("/")[0] for short in inside if "/" in short})
        entries += [{"type": "directory", "oid": "0" * 40, "size": 0, "path": f"{begin}{name}"} for name in folders]
        self.say(200, entries)

    def resolve(self, kind: str, name: str, revision: str, path: str) -> None:
        there = self.repository(kind, name, revision)
        if there is None:
            return
        commit, files = there
        token = f"Bearer {self.hub.gated}"
        if self.hub.gated and self.headers.get("Authorization") != token:
            status = 403 if self.headers.get("Authorization") else 401
            self.say(status, {"error": "Access is restricted."}, X_Error_Code="GatedRepo", X_Repo_Commit=commit)
        elif path not in files:
            self.say(404, {"error": "Entry not found"}, X_Error_Code="EntryNotFound", X_Repo_Commit=commit)
        else:
            content = files[path]
            place = f"{kind}/{name}/{commit}/{quote(path)}"
            linked = {"X_Linked_Size": str(len(content)), "X_Repo_Commit": commit}
            if is_large(path):
                linked |= {"X_Linked_Etag": f'"{hashlib.sha256(content).hexdigest()}"'}
                host = self.headers["Host"]  # large files lie on another one
                other = host.replace("127.0.0.1", "localhost") if host.startswith("127.0.0.1") else f"cdn.{host}"
                self.say(302, {}, Location=f"http://{other}/large/{place}", **linked)
            else:
                linked |= {"X_Linked_Etag": f'"{git_hash(content)}"'}
                self.say(307, {}, Location=f"/api/resolve-cache/{place}", **linked)

    def content(self, kind: str, name: str, commit: str, path: str) -> None:
        true = self.hub.repositories[kind, name].commits[commit][path]
        whole = self.hub.spoilt.get(path, true)
        first = 0
        if (wanted := re.match(r"bytes=(\d+)-", self.headers.get("Range", ""))) and not self.hub.ignores_range:
            first = int(wanted[1])
        self.send_response(206 if first else 200)
        etag = hashlib.sha256(true).hexdigest() if is_large(path) else git_hash(true)
        self.send_header("ETag", f'"{etag}"')
        self.send_header("X-Repo-Commit", commit)
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Length", str(len(whole) - first))
        if first:
            self.send_header("Content-Range", f"bytes {first}-{len(whole) - 1}/{len(whole)}")
        self.end_headers()
        if self.command == "HEAD":
            return
        cuts = self.hub.cuts.get(path)
        if not cuts:
            self.wfile.write(whole[first:])
            return
        self.wfile.write(whole[first : first + cuts.pop(0)])
        self.wfile.flush()
        if self.hub.resets:
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.connection.close()
        self.close_connection = True


def entry(path: str, content: bytes) -> dict:
    """A file in a repository's listing."""
    about = {"type": "file", "oid": git_hash(content), "size": len(content), "path": path}
    if is_large(path):
        about["lfs"] = {"oid": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 134}
    return about


def bert(texts: list[str], weights: str = "pytorch_model.bin", seed: int = 0) -> dict[str, bytes]:
    """A tiny BERT over the characters of `texts`, with the files and names of weights of hfl/chinese-bert-wwm-ext.

    That one was converted from TensorFlow's checkpoint long ago: it has the heads that it was pretrained with, and no
    safetensors; TensorFlow's and Flax's weights lie beside PyTorch's.
    """
    import safetensors.torch
    import torch
    from tokenizers import BertWordPieceTokenizer
    from transformers import BertConfig, BertForPreTraining

    characters = sorted({character for text in texts for character in text.lower() if not character.isspace()})
    known = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *characters, *(f"##{character}" for character in characters)]
    vocabulary = known + [f"[unused{number}]" for number in range(1, 21129 - len(known))]
    size = {"vocab_size": 21128, "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = BertConfig(intermediate_size=512, max_position_embeddings=512, pad_token_id=0, **size)
    torch.manual_seed(seed)
    state = {name: value.clone() for name, value in BertForPreTraining(config).state_dict().items()}
    state["bert.embeddings.position_ids"] = torch.arange(512)[None]
    packed = io.BytesIO()
    if weights.endswith(".bin"):
        torch.save(state, packed)
    else:
        packed.write(safetensors.torch.save(state, {"format": "pt"}))
    about = config.to_dict() | {"architectures": ["BertForMaskedLM"], "directionality": "bidi", "pooler_fc_size": 768}
    names = {f"{name}_token": f"[{name.upper()}]" for name in ("unk", "sep", "pad", "cls", "mask")}
    tokenizer = BertWordPieceTokenizer({token: number for number, token in enumerate(vocabulary)})
    return {
        ".gitattributes": b"*.bin filter=lfs diff=lfs merge=lfs -text\n",
        "README.md": b"---\nlicense: apache-2.0\n---\n",
        "added_tokens.json": b"{}",
        "config.json": json.dumps(about).encode(),
        "flax_model.msgpack": b"for other programs",
        "special_tokens_map.json": json.dumps(names).encode(),
        "tf_model.h5": b"for other programs",
        "tokenizer.json": tokenizer.to_str().encode(),
        "tokenizer_config.json": b'{"init_inputs": []}',
        "vocab.txt": "".join(f"{token}\n" for token in vocabulary).encode(),
        weights: packed.getvalue(),
    }
