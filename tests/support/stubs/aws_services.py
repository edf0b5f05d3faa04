"""The services that give out AWS credentials, and an S3 that says yes, on one scripted server.

What they answer is documented: the instance's metadata in the user guide of EC2 ("Retrieve security
credentials from instance metadata", "Use IMDSv2"), the container's in the developer guide of ECS
("Task IAM role"), STS and IAM Identity Center in their API references.
"""

import datetime
import json
import threading
from urllib.parse import parse_qs, urlsplit

_ROLES = "/latest/meta-data/iam/security-credentials/"

STS = """<{0}Response xmlns="https://sts.amazonaws.com/doc/2011-06-15/"><{0}Result><Credentials>
<AccessKeyId>STSKEY</AccessKeyId><SecretAccessKey>sts-secret</SecretAccessKey>
<SessionToken>sts-token</SessionToken><Expiration>{1}</Expiration></Credentials>
<AssumedRoleUser><Arn>arn:aws:sts::1:assumed-role/r/s</Arn><AssumedRoleId>A:s</AssumedRoleId>
</AssumedRoleUser></{0}Result></{0}Response>"""


class AwsServices:
    """Answers by what is asked; :meth:`first` and :meth:`always` put other answers before that.

    The names of what is asked: ``token``, ``role`` and ``document`` of an instance, ``container``,
    ``sts``, ``sso``, and ``s3``.
    """

    def __init__(self, server) -> None:
        self.url = server.url
        self.Answer = server.Answer
        self.lifetime = datetime.timedelta(hours=1)
        self.asked: list[str] = []
        self.agents: dict[str, str] = {}
        self._first: dict[str, list] = {}
        self._always: dict[str, object] = {}
        self._delays: dict[str, float] = {}
        server.respond(self._respond)

    def first(self, name: str, *answers) -> None:
        self._first[name] = list(answers)

    def always(self, name: str, answer) -> None:
        self._always[name] = answer

    def slowly(self, name: str, seconds: float) -> None:
        """The next answer takes its time."""
        self._delays[name] = seconds

    def _respond(self, request):
        name = self._name(request)
        self.asked.append(name)
        self.agents[name] = request.headers.get("User-Agent", "")
        threading.Event().wait(self._delays.pop(name, 0.0))
        if self._first.get(name):
            return self._first[name].pop(0)
        return self._always.get(name) or getattr(self, f"_{name}")(request)

    def _name(self, request) -> str:
        path = urlsplit(request.target).path
        if path == "/latest/api/token":
            return "token"
        if path.startswith(_ROLES):
            return "document" if path != _ROLES else "role"
        if path == "/federation/credentials":
            return "sso"
        if path == "/container":
            return "container"
        return "sts" if request.body.startswith(b"Action=AssumeRole") else "s3"

    def _expiration(self) -> str:
        now = datetime.datetime.now(datetime.timezone.utc)
        return (now + self.lifetime).strftime("%Y-%m-%dT%H:%M:%SZ")

    def _json(self, **fields):
        return self.Answer(body=json.dumps(fields).encode())

    def _token(self, request):
        return self.Answer(body=b"token-of-the-metadata")

    def _role(self, request):
        return self.Answer(body=b"role")

    def _document(self, request):
        return self._json(
            Code="Success",
            AccessKeyId="INSTANCEKEY",
            SecretAccessKey="instance-secret",
            Token="instance-token",
            Expiration=self._expiration(),
        )

    def _container(self, request):
        return self._json(
            AccessKeyId="CONTAINERKEY",
            SecretAccessKey="container-secret",
            Token="container-token",
            Expiration=self._expiration(),
        )

    def _sts(self, request):
        action = parse_qs(request.body.decode())["Action"][0]
        return self.Answer(body=STS.format(action, self._expiration()).encode())

    def _sso(self, request):
        expires = datetime.datetime.now(datetime.timezone.utc) + self.lifetime
        return self._json(
            roleCredentials={
                "accessKeyId": "SSOKEY",
                "secretAccessKey": "sso-secret",
                "sessionToken": "sso-token",
                "expiration": int(expires.timestamp() * 1000),
            }
        )

    def _s3(self, request):
        return self.Answer(headers={"ETag": '"tag"'})
