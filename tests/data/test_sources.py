"""Reading rows from every kind of source, and what is said about broken ones."""

import gzip
import hashlib
import http.server
import io
import json
import re
import ssl
import threading
from types import SimpleNamespace

import pandas as pd
import pytest
import trustme

from lockstep.config import reading
from lockstep.data import sources
from lockstep.data.labels import Labels
from lockstep.errors import BadInput

ROWS = [("今天 真 开心", 5), ("好 难过", 2), ("哦", 0)]
CLEAN = [("今天真开心", "5"), ("好难过", "2"), ("哦", "0")]


def wanted(**keys):
    return reading.parse({"data": keys, "rows": {"single": {"strategy": "single"}}}).data


def read(tmp_path, notes=None, **keys):
    """The texts of a source, each with its label's name."""
    data, notes = wanted(**keys), [] if notes is None else notes
    labels = Labels(data.labels)
    rows = [(text, number) for text, number, _ in sources.read(data, tmp_path, notes, labels)[1]]
    return [(text, labels.names[number]) for text, number in rows]


def written(tmp_path, kind: str):
    file = tmp_path / f"rows.{kind}"
    if kind == "json":
        file.write_text(json.dumps([list(row) for row in ROWS], ensure_ascii=False), encoding="utf-8")
    elif kind == "jsonl":
        file.write_text("\n".join(json.dumps({"text": t, "label": n}) for t, n in ROWS) + "\n\n", encoding="utf-8")
    elif kind == "parquet":
        pd.DataFrame(ROWS, columns=["text", "label"]).to_parquet(file)
    else:
        separator = "\t" if kind == "tsv" else ","
        pd.DataFrame(ROWS, columns=["text", "label"]).to_csv(file, sep=separator, index=False, encoding="utf-8-sig")
    return file


@pytest.mark.parametrize("kind", ["json", "jsonl", "csv", "tsv", "parquet"])
def test_every_format_gives_the_same_rows(tmp_path, kind):
    assert read(tmp_path, path=str(written(tmp_path, kind))) == CLEAN


def test_blanks_stay_where_the_configuration_says_so(tmp_path):
    assert read(tmp_path, path=str(written(tmp_path, "json")), join_blanks=False)[0] == ("今天 真 开心", "5")


def test_limit_takes_the_first_rows(tmp_path):
    assert read(tmp_path, path=str(written(tmp_path, "csv")), limit=2) == CLEAN[:2]


def test_columns_by_name_and_by_position(tmp_path):
    file = tmp_path / "rows.csv"
    file.write_text("id,stimmung,inhalt\n1,froh,'ja, sehr'\n".replace("'", '"'), encoding="utf-8")
    assert read(tmp_path, path=str(file), text="inhalt", label="stimmung", join_blanks=False) == [("ja, sehr", "froh")]
    file.write_text("text,source,label\nja,app,froh\nnein,web,traurig\n", encoding="utf-8")
    assert read(tmp_path, path=str(file), text=0, label="label", labels=None) == [("ja", "froh"), ("nein", "traurig")]
    file.write_text("1\tfroh\tja\n", encoding="utf-8")
    assert read(tmp_path, path=str(file), format="tsv", text=2, label=1) == [("ja", "froh")]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.json", '[["好", 1], ["坏" 2]]', "a.json, row 2 (line 1, column 17): broken JSON"),
        ("a.json", '[["好", 1],\n ["坏", 2]', "a.json, row 3 (line 2, column 10): broken JSON"),
        ("a.json", '{"text": "好"}', "a.json: expected a JSON list of rows, not dict"),
        ("a.json", '[["好", 1], "坏"]', 'a.json, row 2: is "坏"; expected a list or an object'),
        ("a.json", '[["好", 1], ["坏"]]', "a.json, row 2: has 1 columns, but data.label needs the one at position 1"),
        ("a.json", '[["好", 1], [" ", 1]]', "a.json, row 2: the text is empty"),
        ("a.json", r'[["好", 1], ["好\ud83d", 1]]', "a.json, row 2: the text holds half a character"),
        ("a.json", '[["好", 1], [7, 1]]', "a.json, row 2: the text is 7; expected a string"),
        ("a.json", '[["好", null]]', "a.json, row 1: has no label (it is None)"),
        ("a.jsonl", '{"text": "好", "label": 1}\n{"text": ', "a.jsonl, row 2, column 10: broken JSON"),
        ("a.jsonl", '{"txt": "好", "label": 1}\n', "a.jsonl, row 1: has no column 'text' (it has 'txt', 'label')"),
        ("a.csv", "text,label\n好,1\n坏\n", "a.csv, row 3: has 1 columns; the first has 2"),
        ("a.csv", "text,text,label\n好,好,1\n", "a.csv, row 1: two columns have the same name"),
        ("a.csv", 'text,label\n"好","1"\n"坏"x,"1"\n', "a.csv, row 3: broken CSV"),
        ("a.csv", "inhalt,label\n好,1\n", "a.csv, row 2: has no column 'text'"),
        ("a.parquet", "no parquet", "a.parquet: is not a Parquet file"),
        ("a.bin", "x", "data.format: can't be recognised from a.bin"),
    ],
)
def test_a_broken_row_is_named(tmp_path, name, content, message):
    (tmp_path / name).write_text(content, encoding="utf-8")
    with pytest.raises(BadInput, match=re.escape(message)):
        read(tmp_path, path=str(tmp_path / name))


def test_a_file_that_is_not_utf8_is_named(tmp_path):
    (tmp_path / "a.csv").write_bytes("text,label\n好,1\n".encode("gbk"))
    with pytest.raises(BadInput, match=r"a\.csv: is not UTF-8 text \(line 2\)"):
        read(tmp_path, path=str(tmp_path / "a.csv"))
    (tmp_path / "a.csv").write_bytes(b"text,label\n" + b"good,1\n" * 20000 + "好,1\n".encode("gbk"))
    with pytest.raises(BadInput, match=r"a\.csv: is not UTF-8 text \(line 20002\)"):
        read(tmp_path, path=str(tmp_path / "a.csv"))


def test_a_folder_is_no_file(tmp_path):
    with pytest.raises(BadInput, match=r"data\.path: .* is a folder"):
        read(tmp_path, path=str(tmp_path))


def test_a_hub_dataset_is_read_by_the_datasets_library(tmp_path):
    """A folder stands in for the hub's repository: the datasets library reads both through the same call."""
    written(tmp_path, "jsonl")
    assert read(tmp_path, hub=str(tmp_path), revision="main") == CLEAN


def test_an_unknown_hub_dataset_is_one_message(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(BadInput, match=r"data\.hub: nobody/nothing at revision 0a1b can't be read"):
        read(tmp_path, hub="nobody/nothing", revision="0a1b")


@pytest.fixture
def line():
    """The server: after how many bytes it breaks a connection, whether it serves ranges, the requested ranges."""
    return SimpleNamespace(cuts=[], resumes=True, ranges=[])


@pytest.fixture
def https_server(tmp_path, monkeypatch, line):
    """Serves tmp_path/www by https on this machine; its certificate authority is trusted for the test."""
    (tmp_path / "www").mkdir()
    authority = trustme.CA()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("localhost").configure_cert(context)
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(tmp_path / "ca.pem"))

    class Handler(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *arguments):
            super().__init__(*arguments, directory=str(tmp_path / "www"))

        def log_message(self, *_):
            pass

        def do_GET(self):
            """Serve a file or a range of it, and break the connection where a test says so."""
            line.ranges.append(self.headers.get("Range"))
            if not self.headers.get("Range") or not line.resumes:
                return super().do_GET()
            first = int(self.headers["Range"].removeprefix("bytes=").removesuffix("-"))
            rest = (tmp_path / "www" / self.path.strip("/")).read_bytes()[first:]
            self.send_response(206)
            self.send_header("Content-Length", str(len(rest)))
            self.end_headers()
            self.copyfile(io.BytesIO(rest), self.wfile)

        def copyfile(self, source, outputfile):
            outputfile.write(source.read(line.cuts.pop(0) if line.cuts else -1))

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"https://localhost:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_a_download_is_checked_kept_and_not_fetched_twice(tmp_path, https_server):
    file = written(tmp_path / "www", "json")
    sha256 = hashlib.sha256(file.read_bytes()).hexdigest()
    keys = {"url": f"{https_server}/rows.json", "sha256": sha256}
    assert read(tmp_path / "kept", **keys) == CLEAN
    file.unlink()
    assert read(tmp_path / "kept", **keys) == CLEAN


def test_a_download_with_another_hash_leaves_nothing_behind(tmp_path, https_server):
    written(tmp_path / "www", "json")
    with pytest.raises(BadInput, match=r"has sha256 [0-9a-f]{64}, not 0{64}"):
        read(tmp_path / "kept", url=f"{https_server}/rows.json", sha256="0" * 64)
    assert list((tmp_path / "kept").iterdir()) == []


def test_a_download_that_is_too_large_is_refused(tmp_path, https_server, monkeypatch):
    written(tmp_path / "www", "json")
    monkeypatch.setattr(sources, "MAX_DOWNLOAD", 10)
    with pytest.raises(BadInput, match="is larger than"):
        read(tmp_path / "kept", url=f"{https_server}/rows.json", sha256="0" * 64)
    assert list((tmp_path / "kept").iterdir()) == []


def test_a_download_that_fails_is_one_message(tmp_path, https_server):
    with pytest.raises(BadInput, match=r"nothing\.json can't be fetched: 404"):
        read(tmp_path / "kept", url=f"{https_server}/nothing.json", sha256="0" * 64)


@pytest.mark.parametrize("resumes", [True, False])
def test_a_download_that_is_cut_goes_on(tmp_path, https_server, line, resumes):
    """It resumes where it was cut, or from the beginning if the server serves no ranges."""
    keys = {"url": f"{https_server}/rows.json", "sha256": long_file(tmp_path / "www")}
    line.resumes, line.cuts[:] = resumes, [99_000, 80_000 if resumes else 150_000]
    assert len(read(tmp_path / "kept", **keys)) == 9000
    assert line.ranges == [None, "bytes=65536-", "bytes=131072-"]


def long_file(folder) -> str:
    """Write rows.json, several blocks long. Returns its sha256."""
    content = json.dumps([[f"今天{number}", 5] for number in range(9000)]).encode()
    (folder / "rows.json").write_bytes(content)
    return hashlib.sha256(content).hexdigest()


def test_a_download_that_is_cut_at_one_place_is_one_message(tmp_path, https_server, line):
    keys = {"url": f"{https_server}/rows.json", "sha256": long_file(tmp_path / "www")}
    line.cuts[:] = [99_000, 0]
    with pytest.raises(BadInput, match=r"rows\.json can't be fetched: .*Fetch it by hand"):
        read(tmp_path / "kept", **keys)
    assert list((tmp_path / "kept").iterdir()) == []
    assert len(read(tmp_path / "kept", **keys)) == 9000


def test_a_local_path_wins_over_the_download(tmp_path):
    keys = {"url": "https://example.org/rows.json", "sha256": "0" * 64}
    assert read(tmp_path, path=str(written(tmp_path, "json")), **keys) == CLEAN


@pytest.mark.parametrize(
    "content",
    [
        "text;label\nja, sehr;froh\nnein;traurig\n",
        "text\tlabel\nja, sehr\tfroh\nnein\ttraurig\n",
        'text, label\n"ja, sehr", froh\n"nein", traurig\n',
        'label ,text \nfroh ,"ja, sehr"\ntraurig ,nein\n',
    ],
    ids=["semicolons", "tabs", "blanks after commas", "blanks before commas"],
)
def test_csv_as_spreadsheets_and_people_write_it(tmp_path, content):
    (tmp_path / "rows.csv").write_text(content, encoding="utf-8")
    rows = read(tmp_path, path=str(tmp_path / "rows.csv"), join_blanks=False, labels=None)
    assert rows == [("ja, sehr", "froh"), ("nein", "traurig")]


def test_semicolons_without_a_header(tmp_path):
    (tmp_path / "rows.csv").write_text("1;ja, sehr;froh\n2;nein;froh\n", encoding="utf-8")
    keys = {"text": 1, "label": 2, "join_blanks": False}
    assert read(tmp_path, path=str(tmp_path / "rows.csv"), **keys) == [("ja, sehr", "froh"), ("nein", "froh")]


@pytest.mark.parametrize("kind", ["json", "jsonl", "csv", "tsv"])
def test_packed_files_are_read_as_they_are(tmp_path, kind):
    file = written(tmp_path, kind)
    (tmp_path / f"packed.{kind}.gz").write_bytes(gzip.compress(file.read_bytes()))
    assert read(tmp_path, path=str(tmp_path / f"packed.{kind}.gz")) == CLEAN


def test_a_cut_packed_file_is_named(tmp_path):
    (tmp_path / "a.csv.gz").write_bytes(gzip.compress(b"text,label\n" + b"ja,1\n" * 1000)[:-20])
    with pytest.raises(BadInput, match=r"a\.csv\.gz: is not a whole gzip file"):
        read(tmp_path, path=str(tmp_path / "a.csv.gz"))
    (tmp_path / "b.csv.gz").write_text("text,label\nja,1\n")
    with pytest.raises(BadInput, match=r"b\.csv\.gz: is not a whole gzip file"):
        read(tmp_path, path=str(tmp_path / "b.csv.gz"))


def test_the_home_folder_may_be_written_as_people_do(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    written(tmp_path, "json")
    assert len(read(tmp_path, path="~/rows.json")) == len(CLEAN)


@pytest.mark.parametrize(
    ("labels", "rows", "header"),
    [
        (None, ["froh", "traurig"] * 5, True),
        (None, ["1", "0"], True),
        (["froh", "traurig"], ["froh"], True),
        (["label", "traurig"], ["label", "traurig"], False),  # a name that is a label is one
        (None, list("abcdefgh"), False),  # too few of each to tell
    ],
)
def test_a_header_above_columns_by_position(tmp_path, labels, rows, header):
    """It is left out, with a note; a first row that may be data stays."""
    lines = ["text,label", *(f"text {n},{label}" for n, label in enumerate(rows))]
    (tmp_path / "rows.csv").write_text("\n".join(lines), encoding="utf-8")
    notes, path = [], str(tmp_path / "rows.csv")
    labels_read = [label for _, label in read(tmp_path, notes, path=path, text=0, label=1, labels=labels)]
    assert labels_read == (rows if header else ["label", *rows])
    assert notes == [f"row 1 of {path} (text, label) is taken for the header, not for data"] * header


def test_a_column_by_position_in_rows_that_have_names(tmp_path):
    assert [label for _, label in read(tmp_path, path=str(written(tmp_path, "jsonl")), label=1)] == ["5", "2", "0"]
    assert [label for _, label in read(tmp_path, path=str(written(tmp_path, "csv")), label=1)] == ["5", "2", "0"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.json", "[" * 100_000, "a.json: its lists or objects are nested too deeply"),
        ("a.jsonl", "[" * 100_000, "a.jsonl, row 1: its lists or objects are nested too deeply"),
        ("a.json", f'[["好", {"9" * 5000}]]', "a.json: a number has too many digits"),
        ("a.jsonl", f'["好", {"9" * 5000}]', "a.jsonl, row 1: a number has too many digits"),
    ],
    ids=["json, deep", "jsonl, deep", "json, long", "jsonl, long"],
)
def test_json_that_python_reads_no_further_is_named(tmp_path, name, content, message):
    (tmp_path / name).write_text(content, encoding="utf-8")
    with pytest.raises(BadInput, match=re.escape(message)):
        read(tmp_path, path=str(tmp_path / name))
