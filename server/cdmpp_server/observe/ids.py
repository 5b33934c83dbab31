"""``prediction_id``: a token with a prediction, so that a measurement needs only the token and a latency.

The token contains the query (by hashes) and the prediction. The service stores no list of predictions: any
worker, even one started later, can decode any token. A token is neither secret nor signed: a client that may
call /observe may also send program, device and latency without one. The checksum detects tokens that were
truncated or mistyped.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
import struct
from dataclasses import dataclass
from functools import lru_cache

from cdmpp.prediction import Prediction
from cdmpp.programs.query_options import BACKENDS, FRAMEWORKS, PROTOCOLS

#: Maximum length of a token, in characters.
MAX_ID = 400

_VERSION = 1
# Version; backend, protocol, framework (0: none); lengths of the two names; program hash; device digest;
# latency, lower, upper.
_HEAD = struct.Struct(">B3B2B16s8s3d")
_CHECK_BYTES = 6
# Maximum lengths of the names in bytes of UTF-8, so that a token fits into MAX_ID.
_MAX_DEVICE, _MAX_MODEL = 120, 110
# Allowed range, far beyond any prediction and still safe for sums of ratios.
_SECONDS = (1e-18, 1e18)
_CONTROL = re.compile("[\x00-\x1f\x7f]")
_CODE_OF_BACKEND = {name: code for code, name in enumerate(BACKENDS)}
_CODE_OF_PROTOCOL = {name: code for code, name in enumerate(PROTOCOLS)}
_FRAMEWORKS: tuple[str | None, ...] = (None, *FRAMEWORKS)
_CODE_OF_FRAMEWORK = {name: code for code, name in enumerate(_FRAMEWORKS)}


@dataclass(frozen=True)
class PredictedBefore:
    """Content of a ``prediction_id``.

    Attributes
    ----------
    program_hash : str
        32 hexadecimal digits.
    device, device_digest : str
        Name, and hash of the figures (16 hexadecimal digits): two devices of one name differ here.
    backend, protocol, framework
        Options of the query.
    model_id : str
        Id of the model. A name that is too long for a token is cut and ends with a hash of the whole name.
    latency_s, lower_s, upper_s : float
        The prediction, in seconds.
    """

    program_hash: str
    device: str
    device_digest: str
    backend: str
    protocol: str
    framework: str | None
    model_id: str
    latency_s: float
    lower_s: float
    upper_s: float


def make_id(prediction: Prediction, device_digest: str) -> str:
    """Return the token of a prediction; equal predictions of one model have equal tokens.

    Parameters
    ----------
    prediction : Prediction
        A prediction without an error.
    device_digest : str
        ``DeviceSpec.digest()`` of its device.

    Returns
    -------
    str
        At most :data:`MAX_ID` characters of ``A-Z a-z 0-9 _ -``.

    Raises
    ------
    ValueError
        The prediction has an error.
    """
    if prediction.program_hash is None or prediction.latency_s is None:
        raise ValueError("a prediction with an error has no id")
    device = _fitting(prediction.device, _MAX_DEVICE)
    model = _fitting(prediction.model_id, _MAX_MODEL)
    content = (
        _HEAD.pack(
            _VERSION,
            _CODE_OF_BACKEND[prediction.backend],
            _CODE_OF_PROTOCOL[prediction.protocol],
            _CODE_OF_FRAMEWORK[prediction.framework],
            len(device),
            len(model),
            bytes.fromhex(prediction.program_hash),
            bytes.fromhex(device_digest),
            prediction.latency_s,
            prediction.lower_s,
            prediction.upper_s,
        )
        + device
        + model
    )
    return base64.urlsafe_b64encode(content + _checksum(content)).rstrip(b"=").decode("ascii")


def read_id(text: str) -> PredictedBefore:
    """Decode a token.

    Raises
    ------
    ValueError
        The text is not a token of :func:`make_id`, or is incomplete; the message states the fault.
    """
    if len(text) > MAX_ID:
        raise ValueError(f"a prediction_id has at most {MAX_ID} characters")
    try:
        raw = base64.b64decode(text.encode("ascii") + b"=" * (-len(text) % 4), altchars=b"-_", validate=True)
    except (UnicodeEncodeError, binascii.Error):
        raise ValueError("this is not a prediction_id") from None
    # Python also decodes the other alphabet, and ignores unused bits.
    if base64.urlsafe_b64encode(raw).rstrip(b"=").decode() != text:
        raise ValueError("this is not a prediction_id, or it is incomplete")
    content, check = raw[:-_CHECK_BYTES], raw[-_CHECK_BYTES:]
    if len(content) < _HEAD.size or _checksum(content) != check:
        raise ValueError("this is not a prediction_id, or it is incomplete")
    version, backend, protocol, framework, device_bytes, model_bytes, program, digest, *figures = _HEAD.unpack_from(
        content
    )
    names = content[_HEAD.size :]
    # The checksum is not secret: a client may send any content.
    if (
        version != _VERSION
        or backend >= len(BACKENDS)
        or protocol >= len(PROTOCOLS)
        or framework >= len(_FRAMEWORKS)
        or len(names) != device_bytes + model_bytes
        or not all(_SECONDS[0] <= figure <= _SECONDS[1] for figure in figures)
        or not figures[1] <= figures[0] <= figures[2]
    ):
        raise ValueError("this prediction_id is of another version of the service")
    try:
        device, model = names[:device_bytes].decode(), names[device_bytes:].decode()
    except UnicodeDecodeError:
        raise ValueError("this is not a prediction_id") from None
    # Some databases cannot store control characters.
    if not device or not model or _CONTROL.search(device + model):
        raise ValueError("this is not a prediction_id")
    return PredictedBefore(
        program.hex(),
        device,
        digest.hex(),
        BACKENDS[backend],
        PROTOCOLS[protocol],
        _FRAMEWORKS[framework],
        model,
        *figures,
    )


def _checksum(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=_CHECK_BYTES).digest()


@lru_cache(maxsize=1024)
def _fitting(name: str, limit: int) -> bytes:
    """Return the name in UTF-8; a longer name is cut between characters and ends with a hash."""
    # JSON may contain a lone surrogate, which has no UTF-8 encoding.
    encoded = name.encode("utf-8", "replace")
    if len(encoded) <= limit:
        return encoded
    ending = "~" + hashlib.sha256(encoded).hexdigest()[:8]
    return encoded[: limit - len(ending)].decode("utf-8", "ignore").encode() + ending.encode()
