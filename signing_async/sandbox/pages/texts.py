"""The texts for recipients, in the languages that a signing can have."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Texts:
    """The texts of the invitations and of the signing page; names in braces are replaced."""

    code: str
    invitation: str
    reminder: str
    invites: str
    reminds: str
    valid_until: str
    to_signing: str
    documents: str
    original: str
    sealed: str
    open_original: str
    open_sealed: str
    no_viewer: str
    signers: str
    you: str
    sequential: str
    parallel: str
    from_: str
    sign: str
    approve: str
    read: str
    read_approve: str
    must_read: str
    choose: str
    how_email: str
    how_approval: str
    how_bankid: str
    how_sms: str
    how_other: str
    to_bankid: str
    bankid: str
    bankid_plays: str
    bankid_signs: str
    name: str
    bankid_number: str
    bankid_confirm: str
    bankid_back: str
    decline: str
    decline_cancels: str
    decline_stays: str
    own_page: str
    simulated: str
    state_draft: str
    state_waiting: str
    state_expired: str
    state_signed: str
    state_completed: str
    state_declined: str
    state_cancelled: str
    turn_of: str
    standings: dict[str, str]
    refusals: dict[str, str]
    """Why a recipient in this state can neither sign nor decline."""


ENGLISH = Texts(
    code="en",
    invitation="Please sign",
    reminder="Reminder: please sign",
    invites="{sender} invites you to sign.",
    reminds="{sender} reminds you: your signature is still missing.",
    valid_until="The invitation is valid until",
    to_signing="Open the signing page",
    documents="Documents",
    original="As uploaded",
    sealed="Signed and sealed",
    open_original="Open the original",
    open_sealed="Open the sealed document",
    no_viewer="This browser cannot show a PDF inside a page.",
    signers="Recipients",
    you="you",
    sequential="One after the other",
    parallel="In any order",
    from_="From",
    sign="Sign",
    approve="Approve",
    read="I have read the documents and want to sign them.",
    read_approve="I have read the documents and approve of them.",
    must_read="Tick the box first.",
    choose="Sign or decline.",
    how_email="You were invited by e-mail. One click signs.",
    how_approval="You are asked for your approval. One click approves, without a signature.",
    how_bankid="You sign with BankID, which is simulated here: no app and no real identity are involved.",
    how_sms="The service would send a code to {phone}. This is simulated here: no code is needed.",
    how_other="The method {method} is simulated here: one click signs.",
    to_bankid="Continue with simulated BankID",
    bankid="Simulated BankID",
    bankid_plays="The real service would open the BankID app now. This page stands in for it.",
    bankid_signs="You are about to sign",
    name="Name",
    bankid_number="Identification",
    bankid_confirm="Confirm in simulated BankID",
    bankid_back="Back without signing",
    decline="Decline to sign",
    decline_cancels="This cancels the signing for everybody. It cannot be undone.",
    decline_stays="The others may still sign, but the signing will not be completed. This cannot be undone.",
    own_page="A page of the sandbox only. The specification does not describe how recipients sign.",
    simulated="Simulated",
    state_draft="This signing has not been sent yet. You can read the documents now and sign once you are invited.",
    state_waiting="It is not your turn yet. You will be invited once the recipients before you have signed.",
    state_expired="Your invitation has expired. It was valid until",
    state_signed="You have signed. The sealed documents appear here once everybody has signed. You signed at",
    state_completed="Everybody has signed, and the documents are sealed. You signed at",
    state_declined="You declined to sign at",
    state_cancelled="This signing was cancelled. There is nothing left to do.",
    turn_of="Next to sign:",
    standings={
        "draft": "Not sent",
        "waiting": "Not invited yet",
        "invited": "Invited",
        "expired": "Invitation expired",
        "signed": "Signed",
        "declined": "Declined",
        "cancelled": "Cancelled",
    },
    refusals={
        "draft": "The signing has not been sent yet.",
        "waiting": "It is not your turn yet.",
        "expired": "The invitation has expired.",
        "signed": "You have signed already.",
        "declined": "You have declined already.",
        "cancelled": "The signing was cancelled.",
    },
)

SWEDISH = Texts(
    code="sv",
    invitation="Vänligen signera",
    reminder="Påminnelse: vänligen signera",
    invites="{sender} bjuder in dig att signera.",
    reminds="{sender} påminner dig: din signatur saknas fortfarande.",
    valid_until="Inbjudan gäller till",
    to_signing="Öppna signeringssidan",
    documents="Dokument",
    original="Som uppladdat",
    sealed="Signerat och förseglat",
    open_original="Öppna originalet",
    open_sealed="Öppna det förseglade dokumentet",
    no_viewer="Den här webbläsaren visar inga PDF-filer i en sida.",
    signers="Mottagare",
    you="du",
    sequential="En efter en",
    parallel="I valfri ordning",
    from_="Från",
    sign="Signera",
    approve="Godkänn",
    read="Jag har läst dokumenten och vill signera dem.",
    read_approve="Jag har läst dokumenten och godkänner dem.",
    must_read="Kryssa i rutan först.",
    choose="Signera eller avböj.",
    how_email="Du blev inbjuden per e-post. Ett klick signerar.",
    how_approval="Du ombeds att godkänna. Ett klick godkänner, utan signatur.",
    how_bankid="Du signerar med BankID, som simuleras här: ingen app och ingen verklig identitet är inblandad.",
    how_sms="Tjänsten skulle skicka en kod till {phone}. Det simuleras här: ingen kod behövs.",
    how_other="Metoden {method} simuleras här med ett klick.",
    to_bankid="Fortsätt med simulerat BankID",
    bankid="Simulerat BankID",
    bankid_plays="Den riktiga tjänsten skulle nu öppna BankID-appen. Den här sidan ersätter den.",
    bankid_signs="Du är på väg att signera",
    name="Namn",
    bankid_number="Identifiering",
    bankid_confirm="Bekräfta i simulerat BankID",
    bankid_back="Tillbaka utan att signera",
    decline="Avböj att signera",
    decline_cancels="Då avbryts hela signeringen, för alla. Det kan inte ångras.",
    decline_stays="De andra kan fortfarande signera, men signeringen blir inte slutförd. Det kan inte ångras.",
    own_page="En sida som bara finns i sandlådan; specifikationen beskriver inte hur mottagare signerar.",
    simulated="Simulerat",
    state_draft="Signeringen är inte skickad än. Du kan läsa dokumenten nu och signera när du har bjudits in.",
    state_waiting="Det är inte din tur än. Du bjuds in så snart de före dig har signerat.",
    state_expired="Din inbjudan har gått ut. Den gällde till",
    state_signed="Du har signerat. När alla har gjort det finns de förseglade dokumenten här. Du signerade",
    state_completed="Alla har signerat och dokumenten är förseglade. Du signerade",
    state_declined="Du avböjde att signera",
    state_cancelled="Signeringen avbröts. Det finns inget mer att göra.",
    turn_of="Näst på tur att signera:",
    standings={
        "draft": "Inte skickad",
        "waiting": "Inte inbjuden än",
        "invited": "Inbjuden",
        "expired": "Inbjudan har gått ut",
        "signed": "Signerat",
        "declined": "Avböjt",
        "cancelled": "Avbrutet",
    },
    refusals={
        "draft": "Signeringen är inte skickad än.",
        "waiting": "Det är inte din tur än.",
        "expired": "Inbjudan har gått ut.",
        "signed": "Du har redan signerat.",
        "declined": "Du har redan avböjt.",
        "cancelled": "Signeringen har avbrutits.",
    },
)

LANGUAGES = {"EN": ENGLISH, "SV": SWEDISH}
