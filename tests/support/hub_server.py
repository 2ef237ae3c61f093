"""Hub on the loopback interface, for the unmodified `huggingface_hub` client: repositories with
commits, branches, tags and LFS, in memory."""

import base64
import hashlib
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

LFS_FROM = 1000  # bytes; small, so that a test's files reach it


class Repository:
    """Repository with immutable commits: sha --> {path: bytes}."""

    def __init__(self):
        self.commits, self.tags, self.branches, self.count = {}, {}, {}, 0
        self.branches["main"] = self.add({})

    def add(self, files):
        self.count += 1
        text = json.dumps(
            [self.count, sorted((p, hashlib.sha1(d).hexdigest()) for p, d in files.items())]
        )
        sha = hashlib.sha1(text.encode()).hexdigest()
        self.commits[sha] = files
        return sha

    def sha_of(self, revision):
        found = self.tags.get(revision) or self.branches.get(revision)
        return found or (revision if revision in self.commits else None)


class Hub:
    """Server of repositories: `with Hub() as hub:` starts it; `hub.url` is the value of HF_ENDPOINT."""

    def __init__(self):
        self.repositories, self.blobs, self.requests = {}, {}, []
        handler = type("Handler", (_Handler,), {"hub": self})
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"

    def __enter__(self):
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *exc):
        self.server.shutdown()
        self.server.server_close()


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *args):
        pass

    def answer(self, status, body=b"", **headers):
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def fail(self, status, code):
        self.answer(status, {"error": code}, X_Error_Code=code, X_Error_Message=code)

    def handle_any(self):
        size = int(self.headers.get("Content-Length") or 0)
        self.body = self.rfile.read(size) if size else b""
        path = unquote(urlsplit(self.path).path)
        self.hub.requests.append((self.command, path))
        for method, pattern, action in ROUTES:
            if self.command in method and (match := re.fullmatch(pattern, path)):
                return action(self, **match.groupdict())
        return self.fail(404, "EntryNotFound")

    do_GET = do_POST = do_PUT = do_HEAD = do_DELETE = handle_any  # noqa: N815

    def repository(self, repo):
        found = self.hub.repositories.get(repo)
        if found is None:
            self.fail(404, "RepoNotFound")
        return found

    def create(self):
        wanted = json.loads(self.body)
        repo = f"{wanted.get('organization') or 'me'}/{wanted['name']}"
        exists = repo in self.hub.repositories
        self.hub.repositories.setdefault(repo, Repository())
        self.answer(409 if exists else 200, {"url": f"{self.hub.url}/{repo}"})

    def preupload(self, repo, rev):
        files = json.loads(self.body)["files"]
        modes = [
            {"path": f["path"], "uploadMode": "lfs" if f["size"] >= LFS_FROM else "regular",
             "shouldIgnore": False} for f in files
        ]  # fmt: skip
        if self.repository(repo):
            self.answer(200, {"files": modes})

    def lfs_batch(self, repo):
        objects = []
        for item in json.loads(self.body)["objects"]:
            href = f"{self.hub.url}/lfs/{item['oid']}"
            known = item["oid"] in self.hub.blobs
            actions = {} if known else {"actions": {"upload": {"href": href}}}
            objects.append({"oid": item["oid"], "size": item["size"], **actions})
        self.answer(200, {"transfer": "basic", "objects": objects})

    def lfs_put(self, oid):
        self.hub.blobs[oid] = self.body
        self.answer(200)

    def commit(self, repo, rev):
        repository = self.repository(repo)
        if repository is None:
            return
        lines = [json.loads(line) for line in self.body.decode().splitlines()]
        parent = lines[0]["value"].get("parentCommit")
        head = repository.branches[rev]
        if parent and parent != head:
            self.fail(412, "PreconditionFailed")
            return
        files = dict(repository.commits[head])
        for line in lines[1:]:
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.hub.blobs[value["oid"]]
            else:
                files.pop(value["path"], None)
        sha = repository.branches[rev] = repository.add(files)
        self.answer(
            200,
            {"success": True, "commitOid": sha, "commitUrl": f"{self.hub.url}/{repo}/commit/{sha}"},
        )

    def tag(self, repo, rev):
        repository = self.repository(repo)
        name = json.loads(self.body)["tag"]
        if repository is None:
            return
        if name in repository.tags:
            self.fail(409, "TagExists")
            return
        repository.tags[name] = repository.sha_of(rev)
        self.answer(200, {})

    def info(self, repo, rev=None):
        repository = self.repository(repo)
        if repository is None:
            return
        sha = repository.sha_of(rev or "main")
        if sha is None:
            self.fail(404, "RevisionNotFound")
            return
        names = [{"rfilename": name} for name in sorted(repository.commits[sha])]
        self.answer(200, {"id": repo, "modelId": repo, "sha": sha, "siblings": names,
                          "private": False, "tags": [], "downloads": 0, "likes": 0})  # fmt: skip

    def tree(self, repo, rev):
        repository = self.repository(repo)
        sha = repository and repository.sha_of(rev)
        if sha:
            files = repository.commits[sha].items()
            self.answer(200, [{"type": "file", "path": n, "size": len(d), "oid": hashlib.sha1(d).hexdigest()} for n, d in files])  # fmt: skip
        elif repository:
            self.fail(404, "RevisionNotFound")

    def refs(self, repo):
        repository = self.repository(repo)
        if repository is None:
            return

        def listed(kind, names):
            return [
                {"name": n, "ref": f"refs/{kind}/{n}", "targetCommit": s} for n, s in names.items()
            ]

        self.answer(200, {"branches": listed("heads", repository.branches),
                          "tags": listed("tags", repository.tags), "converts": []})  # fmt: skip

    def resolve(self, repo, rev, file):
        repository = self.repository(repo)
        if repository is None:
            return
        sha = repository.sha_of(rev)
        if sha is None:
            self.fail(404, "RevisionNotFound")
        elif file not in repository.commits[sha]:
            self.answer(404, b"", X_Error_Code="EntryNotFound", X_Repo_Commit=sha)
        else:
            data = repository.commits[sha][file]
            etag = f'"{hashlib.sha256(data).hexdigest()}"'
            self.answer(200, data, ETag=etag, X_Repo_Commit=sha, Accept_Ranges="bytes")

    def whoami(self):
        self.answer(200, {"type": "user", "name": "me", "orgs": []})

    def valid(self):
        self.answer(200, {"errors": [], "warnings": []})


REPO, REV = r"(?P<repo>[\w.-]+/[\w.-]+)", r"(?P<rev>[\w.-]+)"
ROUTES = [
    (("POST",), "/api/repos/create", _Handler.create),
    (("POST",), "/api/validate-yaml", _Handler.valid),
    (("GET",), "/api/whoami-v2", _Handler.whoami),
    (("POST",), f"/api/models/{REPO}/preupload/{REV}", _Handler.preupload),
    (("POST",), f"/{REPO}.git/info/lfs/objects/batch", _Handler.lfs_batch),
    (("PUT",), r"/lfs/(?P<oid>[0-9a-f]{64})", _Handler.lfs_put),
    (("POST",), f"/api/models/{REPO}/commit/{REV}", _Handler.commit),
    (("POST",), f"/api/models/{REPO}/tag/{REV}", _Handler.tag),
    (("GET",), f"/api/models/{REPO}/refs", _Handler.refs),
    (("GET",), f"/api/models/{REPO}/tree/{REV}", _Handler.tree),
    (("GET",), f"/api/models/{REPO}/revision/{REV}", _Handler.info),
    (("GET",), f"/api/models/{REPO}", _Handler.info),
    (("GET", "HEAD"), f"/{REPO}/resolve/{REV}/(?P<file>.+)", _Handler.resolve),
]
