"""Words of the small worlds, and true facts about Python's library that hold in every supported version."""

PEOPLE = "Ada Ben Cleo Dan Eva Finn Gina Hugo Ida Jon Kim Leo Mia Noah Olga Paul Rosa Sam Tom Zoe".split()

THINGS = (
    "apple bag ball basket bell book bottle box coat coin cup drum hammer hat key knife lamp letter map mirror "
    "ring rope shoe spoon"
).split()

PLACES = (
    "aboard ashore away backstage downstairs home indoors inside nearby outdoors outside overhead underground upstairs"
).split()

FUNCTIONS: dict[str, tuple[str, ...]] = {
    "argparse": ("ArgumentParser", "Namespace", "FileType"),
    "ast": ("parse", "unparse", "walk"),
    "binascii": ("hexlify", "unhexlify"),
    "bisect": ("insort",),
    "calendar": ("isleap", "monthrange", "weekday"),
    "collections": ("Counter", "OrderedDict", "defaultdict", "deque", "namedtuple"),
    "contextlib": ("closing", "contextmanager", "suppress", "nullcontext"),
    "copy": ("deepcopy", "copy"),
    "csv": ("DictReader", "DictWriter", "writer"),
    "datetime": ("timedelta", "timezone", "date"),
    "difflib": ("SequenceMatcher", "ndiff"),
    "fnmatch": ("fnmatch", "translate", "fnmatchcase"),
    "fractions": ("Fraction",),
    "functools": ("partial", "reduce", "wraps"),
    "getpass": ("getpass", "getuser"),
    "glob": ("glob", "iglob"),
    "gzip": ("GzipFile", "compress", "decompress"),
    "heapq": ("heapify", "heappop", "heappush", "nlargest", "nsmallest"),
    "hmac": ("digest",),
    "html": ("escape", "unescape"),
    "inspect": ("getdoc", "getmembers", "getsource", "signature"),
    "itertools": ("accumulate", "chain", "combinations", "cycle", "groupby", "islice", "permutations", "product"),
    "json": ("JSONDecoder", "JSONEncoder", "dumps", "loads"),
    "keyword": ("iskeyword", "kwlist"),
    "linecache": ("checkcache", "clearcache", "getline"),
    "locale": ("getlocale", "setlocale", "strcoll"),
    "math": ("ceil", "factorial", "floor", "gcd", "hypot", "isclose", "sqrt"),
    "operator": ("attrgetter", "itemgetter", "methodcaller"),
    "os": ("getcwd", "listdir", "makedirs", "remove", "rename"),
    "pathlib": ("Path", "PurePath", "PosixPath"),
    "platform": ("machine", "processor", "uname"),
    "pprint": ("PrettyPrinter", "pformat", "pprint"),
    "queue": ("LifoQueue", "PriorityQueue", "SimpleQueue"),
    "random": ("choice", "randint", "sample", "shuffle", "uniform"),
    "re": ("findall", "finditer", "fullmatch", "sub"),
    "secrets": ("choice",),
    "shlex": ("join", "quote", "split"),
    "shutil": ("copyfile", "copytree", "move", "rmtree", "which"),
    "signal": ("alarm", "pause"),
    "socket": ("gethostname", "socketpair"),
    "statistics": ("mean", "median", "mode", "stdev", "variance"),
    "string": ("Formatter", "Template", "capwords"),
    "struct": ("calcsize", "pack", "unpack"),
    "subprocess": ("Popen", "run"),
    "tempfile": ("NamedTemporaryFile", "TemporaryDirectory", "mkdtemp", "mkstemp"),
    "textwrap": ("dedent", "fill", "indent", "shorten", "wrap"),
    "threading": ("Barrier", "Condition", "Event", "Lock", "Semaphore", "Thread"),
    "time": ("monotonic", "sleep", "strftime"),
    "tokenize": ("untokenize",),
    "types": ("MappingProxyType", "MethodType", "SimpleNamespace"),
    "unicodedata": ("category", "lookup", "normalize"),
    "weakref": ("WeakKeyDictionary", "WeakSet", "finalize", "proxy"),
    "zipfile": ("ZipFile", "ZipInfo"),
    "zlib": ("compressobj", "decompressobj"),
}
"""Public names of modules of the standard library."""
