"""fastapi_app.py: log in, send contracts, receive their events, archive what was signed.

Set STATE_FOLDER (on a local disk), SIGNING_BASE_URL, SIGNING_CLIENT_ID, SIGNING_CLIENT_SECRET, SIGNING_REDIRECT_URI
(it ends in /callback) and SIGNING_WEBHOOK_SECRET, run ``uvicorn fastapi_app:app``, and open /login. The user who logs
in is the sender of all contracts: protect this page. Everything is made at import time: the process has one event loop.
Once a day, with SIGNING_TOKEN_FILE=$STATE_FOLDER/token.json, archive what lost events did not:
``signing-async archive $STATE_FOLDER/archive --journal $STATE_FOLDER/journal.db``.
"""

import os
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, RedirectResponse
from starlette.routing import Route

from signing_async import (
    AuthError,
    FileTokenStore,
    NewRecipient,
    OAuth,
    PdfSource,
    SigningClient,
    SigningError,
    SigningPackage,
)
from signing_async.archive import Archive
from signing_async.webhooks import Event, Inbox, Receiver, WebhookVerifier, asgi_app

STATE = Path(os.environ["STATE_FOLDER"])
STATE.mkdir(parents=True, exist_ok=True)
BASE_URL = os.environ["SIGNING_BASE_URL"]

oauth = OAuth(
    BASE_URL,
    client_id=os.environ["SIGNING_CLIENT_ID"],
    client_secret=os.environ["SIGNING_CLIENT_SECRET"],
    redirect_uri=os.environ["SIGNING_REDIRECT_URI"],
    store=FileTokenStore(STATE / "token.json"),
)
client = SigningClient(BASE_URL, oauth)
archive = Archive(client, STATE / "archive", journal=STATE / "journal.db")
inbox = Inbox(STATE / "inbox.db")
receiver = Receiver(WebhookVerifier(os.environ["SIGNING_WEBHOOK_SECRET"]), inbox)


@inbox.on("signing.completed")
async def archive_documents(event: Event) -> None:
    if event.signing_id is not None:
        await archive.collect(event.signing_id)


@asynccontextmanager
async def lifespan(_: FastAPI) -> AsyncGenerator[None, None]:
    async with oauth, client, archive, inbox, inbox.running():
        yield
        await receiver.drain()


# This exact path; `mount` would redirect it to /webhooks/.
app = FastAPI(lifespan=lifespan, routes=[Route("/webhooks", asgi_app(receiver))])


@app.get("/login")
async def login() -> RedirectResponse:
    request = oauth.authorization_request()
    response = RedirectResponse(request.url)
    # Keep these in your framework's session, if it has one.
    for name, value in (("signing_state", request.state), ("signing_verifier", request.code_verifier or "")):
        response.set_cookie(name, value, max_age=600, httponly=True, samesite="lax")
    return response


@app.get("/callback")
async def callback(request: Request) -> Response:
    state, verifier = request.cookies.get("signing_state", ""), request.cookies.get("signing_verifier")
    await oauth.exchange(str(request.url), state, verifier or None)
    response = JSONResponse({"logged_in": True})
    for name in ("signing_state", "signing_verifier"):  # a code that is sent twice may revoke the token
        response.delete_cookie(name)
    return response


@app.post("/contracts/{key}")
async def send_contract(key: str, email: str, request: Request) -> dict[str, str]:
    """Send the PDF in the body to one recipient. Repeating the request sends nothing again."""
    package = SigningPackage(key, "EN", [PdfSource(await request.body(), f"{key}.pdf")], [NewRecipient(email)], key=key)
    signing = await client.dispatch(package, STATE / "journal.db")
    return {"signing": signing.id, "state": signing.state}


@app.exception_handler(SigningError)
async def signing_error(_: Request, error: Exception) -> JSONResponse:
    # With its key and the journal, a request whose outcome is unknown can be repeated.
    may_repeat = isinstance(error, SigningError) and (error.transient or error.effect == "unknown")
    status = 503 if may_repeat else 401 if isinstance(error, AuthError) else 400
    return JSONResponse({"error": str(error)}, status_code=status)
