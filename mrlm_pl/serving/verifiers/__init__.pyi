from .client import VerifierClient as VerifierClient
