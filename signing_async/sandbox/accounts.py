"""Users, their applications, and OAuth 2.0: authorization codes, access tokens, rotating refresh tokens.

Of codes and tokens only hashes are stored. An app's secret is stored as it is: `keep_app` returns it again.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from .addresses import is_loopback, split_url
from .clock import Clock
from .database import Database
from .ids import Ids
from .profile import Profile
from .records import App, User
from .refused import Refused, invalid

DEFAULT_TENANT = "sandbox"


class Accounts:
    """Users, applications and tokens."""

    def __init__(self, database: Database, clock: Clock, ids: Ids, profile: Profile) -> None:
        self._database = database
        self._clock = clock
        self._ids = ids
        self._profile = profile

    # users

    def add_user(self, name: str, email: str, tenant: str = DEFAULT_TENANT) -> User:
        """Add a user. Users of one tenant see the same signings and none of another tenant's."""
        with self._database.transaction():
            user = User(self._ids.new("user"), tenant, name, email)
            self._database.insert("users", id=user.id, tenant=tenant, name=name, email=email)
        return user

    def default_user(self) -> User:
        """Return the default user, created on first use."""
        user_id = self._database.value("SELECT value FROM meta WHERE key = 'default_user'")
        if user_id is not None:
            return self.user(user_id)
        with self._database.transaction():
            user = self.add_user("Sandbox User", "user@sandbox.example")
            self._database.insert("meta", key="default_user", value=user.id)
        return user

    def users(self) -> list[User]:
        """Return all users, ordered by tenant."""
        return self._database.select(User, "users", "1 ORDER BY tenant, name, id")

    def user(self, user_id: str) -> User:
        """Return the user with this id, or raise KeyError."""
        user = self._database.get(User, "users", "id = ?", user_id)
        if user is None:
            raise KeyError(f"unknown user {user_id!r}")
        return user

    # applications

    def register_app(self, name: str, redirect_uri: str, user: User | None = None) -> App:
        """Register an application and return it with its secret."""
        errors: dict[str, list[str]] = {}
        if not name.strip() or len(name) > 200:
            errors["name"] = ["The name must have 1 to 200 characters."]
        if problem := _redirect_problem(redirect_uri):
            errors["redirect_uri"] = [f"{redirect_uri!r} must {problem}."]
        if errors:
            raise invalid(errors)
        with self._database.transaction():
            row: dict[str, Any] = {
                "client_id": self._ids.secret("client", "app_")[:24],
                "name": name.strip(),
                "redirect_uri": redirect_uri,
                "user_id": (user or self.default_user()).id,
                "created_at": self._clock.micros(),
            }
            secret = self._ids.secret("client secret", "secret_")
            self._database.insert("apps", secret=secret, **row)
        return App(**row, client_secret=secret)

    def keep_app(self, name: str, redirect_uri: str) -> App:
        """Return the application with its secret; register it if it is not registered."""
        for app in self.apps():
            if (app.name, app.redirect_uri) == (name.strip(), redirect_uri):
                return replace(app, client_secret=self._secret(app.client_id))
        return self.register_app(name, redirect_uri)

    def apps(self) -> list[App]:
        """Return all applications, without their secrets."""
        sql = "SELECT client_id, name, redirect_uri, user_id, created_at FROM apps ORDER BY created_at, client_id"
        return [App(*row) for row in self._database.run(sql)]

    def _secret(self, client_id: str) -> str | None:
        secret: str | None = self._database.value("SELECT secret FROM apps WHERE client_id = ?", client_id)
        return secret

    def app(self, client_id: str) -> App | None:
        """Return the application with this id, or None."""
        return next((app for app in self.apps() if app.client_id == client_id), None)

    # the consent page

    def requesting_app(self, query: Mapping[str, str]) -> App:
        """Return the application that asks for consent; refuse an unknown client_id or redirect_uri."""
        app = self.app(query.get("client_id", ""))
        if app is None:
            raise Refused(400, "invalid_client", "No application has this client_id.")
        if query.get("redirect_uri") != app.redirect_uri:
            message = "The redirect_uri is not the one registered for this application."
            raise Refused(400, "invalid_redirect_uri", message)
        return app

    def code_challenge(self, query: Mapping[str, str]) -> str | None:
        """Return the PKCE challenge, or None; refuse any method but S256."""
        challenge = query.get("code_challenge")
        if challenge is None or not self._profile.pkce:
            return None
        if query.get("code_challenge_method") != "S256" or not re.fullmatch(r"[\w-]{43}", challenge, re.ASCII):
            message = "code_challenge must be 43 characters, code_challenge_method S256."
            raise Refused(400, "invalid_request", message)
        return challenge

    def authorize(self, app: App, *, user: User | None = None, challenge: str | None = None) -> str:
        """Return an authorization code, as if the user had consented."""
        with self._database.transaction():
            code = self._ids.secret("code", "code_")
            self._database.insert(
                "codes",
                hash=_hash(code),
                grant_id=self._new_grant(app.client_id, user),
                redirect_uri=app.redirect_uri,
                expires_at=self._time_after(self._profile.code_lifetime),
                challenge=challenge,
            )
        return code

    # the token endpoint

    def token(self, parameters: Mapping[str, Any]) -> dict[str, Any]:
        """Return the token response, or refuse with a code of RFC 6749."""
        kind = _required(parameters, "grant_type")
        if kind not in {"authorization_code", "refresh_token"}:
            message = "grant_type must be authorization_code or refresh_token."
            raise Refused(400, "unsupported_grant_type", message)
        client_id, secret = _required(parameters, "client_id"), _required(parameters, "client_secret")
        known = self._secret(client_id)
        if known is None or not hmac.compare_digest(known.encode(), secret.encode("utf-8", "replace")):
            raise Refused(401, "invalid_client", "The client_id or the client_secret is wrong.")
        if kind == "refresh_token":
            return self._refresh(client_id, _required(parameters, "refresh_token"))
        redirect_uri, code = _required(parameters, "redirect_uri"), _required(parameters, "code")
        return self._exchange(client_id, redirect_uri, code, parameters.get("code_verifier"))

    def _exchange(self, client_id: str, redirect_uri: str, code: str, verifier: object) -> dict[str, Any]:
        sql = """SELECT grant_id, redirect_uri, expires_at, used_at, challenge
                 FROM codes JOIN grants ON grants.id = grant_id WHERE hash = ? AND client_id = ?"""
        row = self._database.run(sql, _hash(code), client_id).fetchone()
        if row is None:
            raise _invalid_grant("The code is unknown.")
        grant, registered, expires_at, used_at, challenge = row
        if used_at is not None:
            self._revoke_after_replay(grant)
            raise _invalid_grant("The code was used before.")
        if expires_at <= self._clock.micros():
            raise _invalid_grant("The code has expired.")
        if registered != redirect_uri:
            raise _invalid_grant("The redirect_uri is not the one the code was issued for.")
        if challenge is not None and challenge != _s256_challenge(str(verifier)):
            raise _invalid_grant("The code_verifier does not match the code_challenge.")
        with self._database.transaction():
            self._database.run("UPDATE codes SET used_at = ? WHERE hash = ?", self._clock.micros(), _hash(code))
            return self._issue(grant)

    def _refresh(self, client_id: str, refresh_token: str) -> dict[str, Any]:
        sql = """SELECT grant_id, expires_at, replaced_at, revoked_at FROM tokens JOIN grants ON grants.id = grant_id
                 WHERE hash = ? AND kind = 'refresh' AND client_id = ?"""
        row = self._database.run(sql, _hash(refresh_token), client_id).fetchone()
        if row is None:
            raise _invalid_grant("The refresh token is unknown.")
        grant, expires_at, replaced_at, revoked_at = row
        now = self._clock.micros()
        if revoked_at is not None:
            raise _invalid_grant("The refresh token was revoked.")
        if replaced_at is not None and now >= replaced_at + self._profile.replay_grace * 1e6:
            self._revoke_after_replay(grant)
            raise _invalid_grant("The refresh token was used before.")
        if expires_at <= now:
            raise _invalid_grant("The refresh token has expired.")
        with self._database.transaction():
            if self._profile.refresh_revokes_access_tokens:
                self._database.run("DELETE FROM tokens WHERE grant_id = ? AND kind = 'access'", grant)
            if self._profile.rotate_refresh_tokens:
                sql = "UPDATE tokens SET replaced_at = coalesce(replaced_at, ?) WHERE hash = ?"
                self._database.run(sql, now, _hash(refresh_token))
            return self._issue(grant, refresh=self._profile.rotate_refresh_tokens)

    def _revoke_after_replay(self, grant: str) -> None:
        if self._profile.revoke_family_on_replay:
            self._database.update("grants", grant, revoked_at=self._clock.micros())

    def _issue(self, grant: str, *, refresh: bool = True) -> dict[str, Any]:
        lifetime = self._profile.access_token_lifetime
        unit = {"seconds": 1.0, "minutes": 1 / 60, "milliseconds": 1000.0}[self._profile.expires_in_unit]
        response: dict[str, Any] = {
            "access_token": self._new_token("access", grant, lifetime),
            "token_type": "Bearer",
            "expires_in": max(1, int(lifetime * unit)),
        }
        if refresh and self._profile.issue_refresh_tokens:
            response["refresh_token"] = self._new_token("refresh", grant, self._profile.refresh_token_lifetime)
        return response

    # access tokens

    def access_token(self, *, user: User | None = None, lifetime: float | None = None) -> str:
        """Return an access token that expires after `lifetime` seconds; None: never."""
        with self._database.transaction():
            return self._new_token("access", self._new_grant(None, user), lifetime)

    def authenticate(self, authorization: str | None) -> User:
        """Return the user of an Authorization header."""
        scheme, _, token = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not token.strip():
            status = self._profile.missing_token_status
            raise Refused(status, "unauthenticated", "An access token is required.", headers=_www_authenticate(status))
        sql = """SELECT users.* FROM tokens JOIN grants ON grants.id = grant_id JOIN users ON users.id = user_id
                 WHERE hash = ? AND kind = 'access' AND revoked_at IS NULL AND (expires_at IS NULL OR expires_at > ?)"""
        row = self._database.run(sql, _hash(token.strip()), self._clock.micros()).fetchone()
        if row is None:
            raise self.token_rejected()
        return User(*row)

    def token_rejected(self) -> Refused:
        """Return the refusal of an access token that is expired, revoked or unknown."""
        status = self._profile.expired_token_status
        headers = _www_authenticate(status, ', error="invalid_token"')
        return Refused(status, "invalid_token", "The access token is invalid or has expired.", headers=headers)

    def _new_grant(self, client_id: str | None, user: User | None) -> str:
        grant, user_id = self._ids.secret("grant", ""), (user or self.default_user()).id
        now = self._clock.micros()
        self._database.insert("grants", id=grant, client_id=client_id, user_id=user_id, created_at=now)
        return grant

    def _new_token(self, kind: str, grant: str, lifetime: float | None) -> str:
        token = self._ids.secret(f"{kind} token", f"{kind}_")
        expires_at = None if lifetime is None else self._time_after(lifetime)
        self._database.insert("tokens", hash=_hash(token), kind=kind, grant_id=grant, expires_at=expires_at)
        return token

    def _time_after(self, seconds: float) -> int:
        return self._clock.micros() + int(seconds * 1e6)


def _hash(secret: str) -> str:
    return hashlib.sha256(secret.encode("utf-8", "surrogatepass")).hexdigest()


def _invalid_grant(message: str) -> Refused:
    return Refused(400, "invalid_grant", message)


def _required(parameters: Mapping[str, Any], name: str) -> str:
    value = parameters.get(name, "")
    if not isinstance(value, str) or not value:
        raise Refused(400, "invalid_request", f"{name} is required and must be a string.")
    return value


def _s256_challenge(verifier: str) -> str:
    """Return the S256 challenge of a verifier (RFC 7636)."""
    return base64.urlsafe_b64encode(hashlib.sha256(verifier.encode()).digest()).rstrip(b"=").decode()


def _www_authenticate(status: int, error: str = "") -> dict[str, str]:
    return {"WWW-Authenticate": f'Bearer realm="sandbox"{error}'} if status == 401 else {}


def _redirect_problem(uri: str) -> str | None:
    parts = split_url(uri)
    if parts is None or parts.fragment:
        return "be an absolute URL without a fragment"
    if parts.scheme == "https" or (parts.scheme == "http" and is_loopback(parts.hostname or "")):
        return None
    return "begin with https://, or with http:// and a loopback host"
