"""Files that this process must be able to read: why it cannot, and what to do."""

from __future__ import annotations

import os
import pwd
from pathlib import Path


def user_name(user: int) -> str:
    """The name of a user id, or the number if it has none."""
    try:
        return pwd.getpwuid(user).pw_name
    except KeyError:
        return str(user)


def unreadable(path: Path, create: str = "", service: int | None = None) -> str:
    """Return why a file cannot be read and what to do; an empty text if it can.

    `create` is what to do if there is no such file. `service` is the user id of the service, if known.
    """
    try:
        path.open("rb").close()
    except FileNotFoundError as error:
        return f"{error.strerror}; {create}" if create else str(error.strerror)
    except IsADirectoryError:
        return "it is a directory; name a file"
    except PermissionError as error:
        user = os.geteuid()
        remedy = (
            _remedy(path.absolute(), user)
            if service in (None, user)
            else f"run this as user {user_name(service)}, as the service does"
        )
        return f"{error.strerror} for user {user_name(user)}; {remedy}"
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _remedy(path: Path, user: int) -> str:
    """What root does to let this process's user read a file."""
    for directory in reversed(path.parents):
        if not os.access(directory, os.X_OK):
            return f"chmod a+x {directory}"
    found = path.stat()
    remedies = [] if found.st_uid == user else [f"chown {user_name(user)} {path}"]
    if not found.st_mode & 0o400:
        remedies.append(f"chmod u+r {path}")
    return " && ".join(remedies) or f"see `getfacl {path}`"
