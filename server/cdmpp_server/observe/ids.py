"""``prediction_id``: a signed token with a prediction, so that a measurement needs only the token and a latency.

A token contains the query (by hashes) and the prediction. The service stores no list of predictions: any worker of
the same database, even one started later, can read any token. The database holds the key of the signature, so a client
cannot invent a prediction, a device or a model.

A token has two parts. The receipt is different in each result of each response, so that each result counts once. The
content is equal for equal predictions, so it is rendered and signed once and then cached. A receipt is not bound to
a content, but exchanging receipts between tokens gives a client no further receipts.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import re
import struct
from dataclasses import dataclass
from functools import lru_cache
from secrets import token_bytes

import numpy as np

from cdmpp.predict.prediction import Prediction
from cdmpp.programs.query_options import ALL_FRAMEWORKS, BACKENDS, PROTOCOLS, launcher_of

#: Maximum length of a token, in characters.
MAX_ID = 400

_VERSION = 2
# Version; backend, protocol, framework (0: none); lengths of the two names; program hash; device digest;
# latency, lower, upper.
_HEAD = struct.Struct(">B3B2B16s8s3d")
_SIGNATURE_BYTES = 16
# A receipt: a random number per response, the position of the result, a signature. Multiples of 3 bytes are whole
# characters of base64. One HMAC is expanded to the signatures of a block of results.
_NONCE_BYTES, _POSITION_BYTES, _TAG_BYTES = 9, 3, 9
_BLOCK = 16
_RECEIPT_BYTES = _NONCE_BYTES + _POSITION_BYTES + _TAG_BYTES
_RECEIPT = _RECEIPT_BYTES // 3 * 4
#: Characters of a receipt without its signature.
_NUMBER = (_NONCE_BYTES + _POSITION_BYTES) // 3 * 4
# Maximum lengths of the names in bytes of UTF-8, so that a token fits into MAX_ID.
_MAX_DEVICE, _MAX_MODEL = 110, 98
_CONTROL = re.compile("[\x00-\x1f\x7f]")
_TOKEN = re.compile("[A-Za-z0-9_-]+")
_CODE_OF_BACKEND = {name: code for code, name in enumerate(BACKENDS)}
_CODE_OF_PROTOCOL = {name: code for code, name in enumerate(PROTOCOLS)}
_FRAMEWORKS: tuple[str | None, ...] = (None, *ALL_FRAMEWORKS)
_CODE_OF_FRAMEWORK = {name: code for code, name in enumerate(_FRAMEWORKS)}


@dataclass(frozen=True)
class PredictedBefore:
    """Content of a ``prediction_id``."""

    #: 32 hexadecimal digits.
    program_hash: str
    #: Name, and hash of the figures (16 hexadecimal digits): two devices of one name differ here.
    device: str
    device_digest: str
    #: Options of the query; the framework is the one whose kernels were predicted, so it expresses the implementation.
    backend: str
    protocol: str
    framework: str | None
    #: Id of the model. A name that is too long for a token is cut and ends with a hash of the whole name.
    model_id: str
    #: The prediction, in seconds.
    latency_s: float
    lower_s: float
    upper_s: float
    #: Identifies the result of a response, in 16 characters.
    receipt: str | None = None


class Signer:
    """Makes and reads tokens.

    ``key``: secret that all workers share.
    """

    def __init__(self, key: bytes) -> None:
        # Separate keys: a signature of one part is never one of the other.
        self._of_contents = hmac.digest(key, b"content", "sha256")
        self._of_receipts = hmac.digest(key, b"receipt", "sha256")

    def receipts(self, count: int) -> list[str]:
        """Return new receipts, one for each result of a response."""
        nonce = token_bytes(_NONCE_BYTES)
        tags = b"".join(self._tags(nonce, block) for block in range(-(-count // _BLOCK)))
        raw = np.empty((count, _RECEIPT_BYTES), np.uint8)
        raw[:, :_NONCE_BYTES] = np.frombuffer(nonce, np.uint8)
        # The last three bytes of a big-endian number of four.
        raw[:, _NONCE_BYTES:-_TAG_BYTES] = np.arange(count, dtype=">u4").view(np.uint8).reshape(count, 4)[:, 1:]
        raw[:, -_TAG_BYTES:] = np.frombuffer(tags, np.uint8).reshape(-1, _TAG_BYTES)[:count]
        text = base64.urlsafe_b64encode(raw.tobytes()).decode("ascii")
        return [text[i : i + _RECEIPT] for i in range(0, _RECEIPT * count, _RECEIPT)]

    def content(self, prediction: Prediction, device_digest: str) -> str:
        """Return the content of a token; equal predictions of one model have equal contents.

        ``device_digest``: ``DeviceSpec.digest()`` of the prediction's device. The content has the characters ``A-Z a-z
        0-9 _ -``, with a receipt before it at most :data:`MAX_ID` of them.
        Raises ValueError: the prediction has an error.
        """
        if prediction.program_hash is None or prediction.latency_s is None:
            raise ValueError("a prediction with an error has no id")
        device = _fitting(prediction.device, _MAX_DEVICE)
        model = _fitting(prediction.model_id, _MAX_MODEL)
        framework = prediction.framework
        if prediction.implementation is not None:
            framework = launcher_of(prediction.name.partition(":")[0], framework, prediction.implementation)
        head = _HEAD.pack(
            _VERSION,
            _CODE_OF_BACKEND[prediction.backend],
            _CODE_OF_PROTOCOL[prediction.protocol],
            _CODE_OF_FRAMEWORK[framework],
            len(device),
            len(model),
            bytes.fromhex(prediction.program_hash),
            bytes.fromhex(device_digest),
            prediction.latency_s,
            prediction.lower_s,
            prediction.upper_s,
        )
        raw = head + device + model
        return base64.urlsafe_b64encode(raw + self._signature(raw)).rstrip(b"=").decode("ascii")

    def read(self, text: str) -> PredictedBefore:
        """Read a token.

        Raises ValueError: this service did not make the token, or it was changed or is incomplete.
        """
        if len(text) > MAX_ID:
            raise ValueError(f"a prediction_id has at most {MAX_ID} characters")
        receipt, content = text[:_RECEIPT], text[_RECEIPT:]
        # A length of 4 n + 1 is no base64; unused bits are checked because Python ignores them.
        if not _TOKEN.fullmatch(text) or len(content) % 4 == 1:
            raise ValueError("this is not a prediction_id")
        raw = base64.urlsafe_b64decode(content + "=" * (-len(content) % 4))
        exact = base64.urlsafe_b64encode(raw).rstrip(b"=").decode("ascii") == content
        raw, signature = raw[:-_SIGNATURE_BYTES], raw[-_SIGNATURE_BYTES:]
        signed = hmac.compare_digest(signature, self._signature(raw)) and self._is_signed(receipt)
        if not exact or not signed:
            raise ValueError("this prediction_id is not one of this service, or it was changed or cut")
        return _unpack(raw, receipt[:_NUMBER])

    def _is_signed(self, receipt: str) -> bool:
        if len(receipt) < _RECEIPT:
            return False
        raw = base64.urlsafe_b64decode(receipt)
        nonce, tag = raw[:_NONCE_BYTES], raw[-_TAG_BYTES:]
        block, place = divmod(int.from_bytes(raw[_NONCE_BYTES:-_TAG_BYTES]), _BLOCK)
        expected = self._tags(nonce, block)[_TAG_BYTES * place : _TAG_BYTES * (place + 1)]
        return hmac.compare_digest(tag, expected)

    def _tags(self, nonce: bytes, block: int) -> bytes:
        seed = hmac.digest(self._of_receipts, nonce + block.to_bytes(_POSITION_BYTES), "sha256")
        return hashlib.shake_256(seed).digest(_TAG_BYTES * _BLOCK)

    def _signature(self, content: bytes) -> bytes:
        return hmac.digest(self._of_contents, content, "sha256")[:_SIGNATURE_BYTES]


def _unpack(raw: bytes, receipt: str) -> PredictedBefore:
    """Fields of a content that this service has signed, maybe an earlier version of it."""
    if raw[0] != _VERSION:
        raise ValueError("this prediction_id is of another version of the service")
    _, backend, protocol, framework, device_bytes, _, program, digest, latency_s, lower_s, upper_s = _HEAD.unpack_from(
        raw
    )
    device, model = raw[_HEAD.size :][:device_bytes], raw[_HEAD.size + device_bytes :]
    return PredictedBefore(
        program.hex(),
        device.decode(),
        digest.hex(),
        BACKENDS[backend],
        PROTOCOLS[protocol],
        _FRAMEWORKS[framework],
        model.decode(),
        latency_s,
        lower_s,
        upper_s,
        receipt,
    )


@lru_cache(maxsize=1024)
def _fitting(name: str, limit: int) -> bytes:
    """Return the name in UTF-8; a longer name is cut between characters and ends with a hash."""
    # JSON may contain a lone surrogate, which has no UTF-8 encoding, and characters that some databases cannot store.
    encoded = _CONTROL.sub("?", name).encode("utf-8", "replace")
    if len(encoded) <= limit:
        return encoded
    ending = "~" + hashlib.sha256(encoded).hexdigest()[:8]
    return encoded[: limit - len(ending)].decode("utf-8", "ignore").encode() + ending.encode()
