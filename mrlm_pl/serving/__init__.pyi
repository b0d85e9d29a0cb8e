from .environments.client import RemoteEnvironment as RemoteEnvironment
