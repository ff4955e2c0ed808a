"""The configuration: TOML with positions, the settings of all packages, and its checks.

tomlfile     a file and its fragments, with the position of every key
tomlstruct   values into structs; every mistake with file, line, key and remedy
settings     the whole configuration
checks       what `streambridge check` finds beyond mistakes in the file
"""

from bridge.config.settings import Config as Config
from bridge.config.settings import load as load
