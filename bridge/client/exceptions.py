"""The exceptions of the AWS SDK (package `stream-manager`, module `exceptions`), under their names."""

from __future__ import annotations


class StreamManagerException(Exception):  # noqa: N818 - these names are the SDK's
    """The base of all; `status` and `request_id` are those of the reply, if there was one.

    `sequence_numbers`, our extension, are those of messages that were stored in spite of the error.
    """

    def __init__(self, message: str = "", status: int | None = None, request_id: str | None = None) -> None:
        """As the SDK makes it."""
        super().__init__(message)
        self.message, self.status, self.request_id = message, status, request_id
        self.sequence_numbers: list[int] = []


class ClientException(StreamManagerException):
    """Raised for an error on the client's side."""


class ValidationException(ClientException):
    """Raised for an invalid request, before it is sent."""


class ConnectFailedException(ClientException):
    """Raised when the broker refuses the connection."""


class InvalidRequestException(StreamManagerException):
    """Raised when the server finds the request invalid, or the stream to be created exists."""


class RequestPayloadTooLargeException(StreamManagerException):
    """Raised when a message is too large for the stream or for a packet."""


class ResourceNotFoundException(StreamManagerException):
    """Raised when there is no such stream."""


class ResponsePayloadTooLargeException(StreamManagerException):
    """Raised when the reply does not fit into one packet."""


class ServerTimeoutException(StreamManagerException):
    """Raised when the server took too long."""


class UnauthorizedException(StreamManagerException):
    """Raised when the client does not have the right."""


class UnknownFailureException(StreamManagerException):
    """Raised when the stream is full, or the disk fails."""


class NotEnoughMessagesException(StreamManagerException):
    """Raised when a read does not get its minimum of messages in time."""


class MessageStoreReadErrorException(StreamManagerException):
    """Raised when stored messages are damaged."""


class ServerOutOfMemoryException(StreamManagerException):
    """Raised when the server has no memory left."""


class UpdateFailedException(StreamManagerException):
    """Raised when an update could not be carried out."""


class UnknownOperationException(StreamManagerException):
    """Raised when the server does not know the operation."""


class UpdateNotAllowedException(InvalidRequestException):
    """Raised when an update changes something that cannot be changed."""


BY_STATUS: dict[int, type[StreamManagerException]] = {
    1: UnknownFailureException,
    2: UnauthorizedException,
    3: InvalidRequestException,
    4: RequestPayloadTooLargeException,
    5: ResourceNotFoundException,
    6: ServerTimeoutException,
    7: ResponsePayloadTooLargeException,
    13: NotEnoughMessagesException,
    14: MessageStoreReadErrorException,
    15: ServerOutOfMemoryException,
    16: UpdateFailedException,
    17: UpdateNotAllowedException,
    18: UnknownOperationException,
}
