"""The profiles that pools start from, read: what is wrong with one is said in the same words everywhere."""

from collections.abc import Mapping

from slagate.pools.fleet_file.rules import FleetFault
from slagate.workers.profiles.profile import Profile, TpProfile, load_profile


def read_profiles(
    specs: Mapping[str, tuple[str, int | None]],
) -> tuple[dict[str, TpProfile], list[FleetFault]]:
    """The profiles that can be used, by pool, and what is wrong with the others.

    `specs` has for each pool the name or path of its profile, and its tensor parallel size; None: that was
    refused already. A fault is at `pools.NAME.profile` or `pools.NAME.tp`.
    """
    found: dict[str, TpProfile] = {}
    faults: list[FleetFault] = []
    files: dict[str, Profile] = {}
    for name, (profile, tp) in specs.items():
        key = "profile"
        try:
            if profile not in files:
                files[profile] = load_profile(profile)
            measured = files[profile]
            if tp is not None:
                key = "tp"
                found[name] = measured.tp(tp)
        except ValueError as error:  # a ProfileError, or a path that is none
            got: object = profile if key == "profile" else tp
            faults.append(FleetFault(("pools", name, key), str(error), got))
    return found, faults
