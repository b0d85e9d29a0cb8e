"""Certificates for the tests of TLS."""

from __future__ import annotations

import datetime
import ipaddress
from pathlib import Path
from typing import Any


class Authority:
    """An authority that signs certificates for 127.0.0.1."""

    def __init__(self, folder: Path, name: str) -> None:
        from cryptography.hazmat.primitives.asymmetric import ec

        self.folder, self.name = folder, name
        self.key = ec.generate_private_key(ec.SECP256R1())
        self.file = self._certificate(name, self.key, authority=True)

    def identity(self, name: str) -> tuple[str, str]:
        """Return the files of a certificate and its key."""
        from cryptography.hazmat.primitives import serialization as form
        from cryptography.hazmat.primitives.asymmetric import ec

        key = ec.generate_private_key(ec.SECP256R1())
        path = self.folder / f"{name}.key"
        plain = form.NoEncryption()
        path.write_bytes(key.private_bytes(form.Encoding.PEM, form.PrivateFormat.PKCS8, plain))
        return self._certificate(name, key), str(path)

    def _certificate(self, name: str, key: Any, authority: bool = False) -> str:
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.x509.oid import NameOID

        def named(text: str) -> x509.Name:
            return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])

        now, day = datetime.datetime.now(datetime.UTC), datetime.timedelta(days=1)
        builder = x509.CertificateBuilder(named(self.name), named(name), key.public_key())
        builder = builder.serial_number(x509.random_serial_number()).not_valid_before(now - day)
        builder = builder.not_valid_after(now + day)
        builder = builder.add_extension(x509.BasicConstraints(ca=authority, path_length=None), critical=True)
        address = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
        made = builder.add_extension(address, critical=False).sign(self.key, hashes.SHA256())
        path = self.folder / f"{name}.pem"
        path.write_bytes(made.public_bytes(serialization.Encoding.PEM))
        return str(path)
