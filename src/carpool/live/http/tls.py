"""TLS at both ends of the API: which certificates clients accept, and what a service needs to show one.

A client that found the service through its home accepts exactly the certificate that is copied there, whatever name it
has. Others accept what the system trusts, or the certificates in the file that `CARPOOL_CA` names.
"""

import os
import ssl
from pathlib import Path

from carpool.errors import InputError
from carpool.live.home import Home

ENV_CA = "CARPOOL_CA"


def client_context(place: Home | None = None, ca: str | None = None) -> ssl.SSLContext:
    """Return what a client checks a service's certificate with. Raise `InputError` for a file that holds none."""
    own = place.certificate if place is not None and place.certificate.exists() else None
    given = ca or os.environ.get(ENV_CA)
    path = str(own) if own is not None and not given else given
    try:
        context = ssl.create_default_context(cafile=path)
    except (OSError, ssl.SSLError) as error:
        raise InputError(
            f"{path}: {error}; name a file with the certificate of the service, or of its authority"
        ) from None
    if path is not None:
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # the certificate itself may be trusted
    if own is not None and not given:  # only this one is accepted, so its name says nothing more
        context.check_hostname = False
    return context


def check_files(certificate: Path | None, key: Path | None) -> None:
    """Refuse a certificate without its key, and files that do not belong together."""
    if certificate is None and key is None:
        return
    if certificate is None or key is None:
        raise InputError("--tls-certificate, --tls-key: belong together; give both")
    try:
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(certificate, key)
    except (OSError, ssl.SSLError) as error:
        raise InputError(
            f"--tls-certificate {certificate}: {error}; give a certificate and its key in PEM form"
        ) from None
