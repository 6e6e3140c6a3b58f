//! Which addresses may be connected to: public ones, and those in networks that the grant allows.
//!
//! A name is what its owner says it is, also one that a plugin may ask: `127.0.0.1`, the node's metadata, a neighbour. So the address counts
//! that was looked up, and the same one is connected to. An address of IPv6 that stands for one of IPv4 counts as both.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// What is no public unicast address of IPv4, by the registry of IANA for special purposes.
const SPECIAL_V4: &[(Ipv4Addr, u8)] = &[
    (Ipv4Addr::new(0, 0, 0, 0), 8),
    (Ipv4Addr::new(10, 0, 0, 0), 8),
    (Ipv4Addr::new(100, 64, 0, 0), 10),
    (Ipv4Addr::new(127, 0, 0, 0), 8),
    // The metadata of most clouds is in there.
    (Ipv4Addr::new(169, 254, 0, 0), 16),
    (Ipv4Addr::new(172, 16, 0, 0), 12),
    (Ipv4Addr::new(192, 0, 0, 0), 24),
    (Ipv4Addr::new(192, 0, 2, 0), 24),
    (Ipv4Addr::new(192, 88, 99, 0), 24),
    (Ipv4Addr::new(192, 168, 0, 0), 16),
    (Ipv4Addr::new(198, 18, 0, 0), 15),
    (Ipv4Addr::new(198, 51, 100, 0), 24),
    (Ipv4Addr::new(203, 0, 113, 0), 24),
    (Ipv4Addr::new(224, 0, 0, 0), 4),
    (Ipv4Addr::new(240, 0, 0, 0), 4),
    // Azure's servers for its own virtual machines, which look public.
    (Ipv4Addr::new(168, 63, 129, 16), 32),
];
/// Within 2000::/3, out of which all public unicast addresses of IPv6 are.
const SPECIAL_V6: &[(Ipv6Addr, u8)] = &[
    // Protocols, Teredo among them.
    (Ipv6Addr::new(0x2001, 0, 0, 0, 0, 0, 0, 0), 23),
    (Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 0), 32),
    (Ipv6Addr::new(0x3fff, 0, 0, 0, 0, 0, 0, 0), 20),
];
const GLOBAL_V6: (Ipv6Addr, u8) = (Ipv6Addr::new(0x2000, 0, 0, 0, 0, 0, 0, 0), 3);
/// The prefix by which NAT64 reaches IPv4.
const NAT64: (Ipv6Addr, u8) = (Ipv6Addr::new(0x64, 0xff9b, 0, 0, 0, 0, 0, 0), 96);

/// A network, as in `10.0.0.0/8`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Network {
    base: IpAddr,
    prefix: u8,
}

/// A network that cannot be read.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is no network; write it as 10.0.0.0/8 or fd00::/8")]
pub(super) struct Error(String);

impl Network {
    /// Reads one; without a length it is one address.
    pub(super) fn parse(text: &str) -> Result<Self, Error> {
        let failed = || Error(text.to_owned());
        let (base, prefix) = text.split_once('/').map_or((text, None), |(base, prefix)| (base, Some(prefix)));
        let base: IpAddr = base.parse().map_err(|_| failed())?;
        let most = if base.is_ipv4() { 32 } else { 128 };
        let prefix = prefix.map_or(Ok(most), |prefix| prefix.parse().map_err(|_| failed()))?;
        if prefix > most { Err(failed()) } else { Ok(Self { base, prefix }) }
    }

    fn has(&self, address: IpAddr) -> bool {
        match (self.base, address) {
            (IpAddr::V4(base), IpAddr::V4(address)) => in_v4(address, (base, self.prefix)),
            (IpAddr::V6(base), IpAddr::V6(address)) => in_v6(address, (base, self.prefix)),
            _ => false,
        }
    }
}

/// Whether this one may be connected to.
pub(super) fn is_allowed(address: IpAddr, allowed: &[Network]) -> bool {
    let stands_for = match address {
        IpAddr::V4(_) => None,
        IpAddr::V6(address) => v4_of(address),
    };
    let named = |address| allowed.iter().any(|network| network.has(address));
    if named(address) {
        return true;
    }
    match (address, stands_for) {
        (_, Some(v4)) => is_public_v4(v4) || named(IpAddr::V4(v4)),
        (IpAddr::V4(address), None) => is_public_v4(address),
        (IpAddr::V6(address), None) => is_public_v6(address),
    }
}

fn is_public_v4(address: Ipv4Addr) -> bool {
    !SPECIAL_V4.iter().any(|network| in_v4(address, *network))
}

fn is_public_v6(address: Ipv6Addr) -> bool {
    in_v6(address, GLOBAL_V6) && !SPECIAL_V6.iter().any(|network| in_v6(address, *network))
}

/// The address of IPv4 behind one of IPv6: mapped, compatible, by 6to4 or by NAT64.
fn v4_of(address: Ipv6Addr) -> Option<Ipv4Addr> {
    let [_, _, a, b, c, d, ..] = address.octets();
    if address.segments()[0] == 0x2002 {
        return Some(Ipv4Addr::new(a, b, c, d));
    }
    if in_v6(address, NAT64) {
        let [.., a, b, c, d] = address.octets();
        return Some(Ipv4Addr::new(a, b, c, d));
    }
    // `::` and `::1` become 0.0.0.0 and 0.0.0.1, which are not public either.
    address.to_ipv4()
}

fn in_v4(address: Ipv4Addr, (base, prefix): (Ipv4Addr, u8)) -> bool {
    let differs = u32::from(address) ^ u32::from(base);
    differs.leading_zeros() >= u32::from(prefix)
}

fn in_v6(address: Ipv6Addr, (base, prefix): (Ipv6Addr, u8)) -> bool {
    let differs = u128::from(address) ^ u128::from(base);
    differs.leading_zeros() >= u32::from(prefix)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn allowed(address: &str, networks: &[&str]) -> bool {
        let networks: Vec<_> = networks.iter().map(|network| Network::parse(network).expect(network)).collect();
        is_allowed(address.parse().expect(address), &networks)
    }

    #[test]
    fn only_public_addresses_are_connected_to() {
        for address in [
            "1.1.1.1",
            "9.255.255.255",
            "11.0.0.1",
            "100.63.255.255",
            "100.128.0.1",
            "126.1.1.1",
            "128.0.0.1",
            "169.253.1.1",
            "172.15.1.1",
            "172.32.0.1",
            "192.0.1.1",
            "193.168.1.1",
            "223.255.255.255",
            "2606:4700::1111",
            "2a00::1",
            "::ffff:1.1.1.1",
            "64:ff9b::1.1.1.1",
            "2002:101:101::1",
        ] {
            assert!(allowed(address, &[]), "{address}");
        }
        for address in [
            "0.0.0.0",
            "0.1.2.3",
            "10.0.0.1",
            "100.64.0.1",
            "100.100.100.200",
            "127.0.0.1",
            "127.255.255.255",
            "168.63.129.16",
            "169.254.169.254",
            "172.16.0.1",
            "172.31.255.255",
            "192.0.0.192",
            "192.0.2.1",
            "192.168.0.1",
            "198.18.0.1",
            "198.19.255.255",
            "198.51.100.7",
            "203.0.113.7",
            "224.0.0.1",
            "240.0.0.1",
            "255.255.255.255",
            "::",
            "::1",
            "::127.0.0.1",
            "::ffff:127.0.0.1",
            "::ffff:169.254.169.254",
            "64:ff9b::10.0.0.1",
            "64:ff9b:1::1",
            "2002:7f00:1::1",
            "2002:a9fe:a9fe::",
            "2001::1",
            "2001:db8::1",
            "3fff::1",
            "100::1",
            "fc00::1",
            "fd00:ec2::254",
            "fe80::1",
            "fec0::1",
            "ff02::1",
            "5f00::1",
        ] {
            assert!(!allowed(address, &[]), "{address}");
        }
    }

    #[test]
    fn a_network_that_the_grant_allows_is_connected_to_and_its_neighbour_is_not() {
        let networks = ["10.1.0.0/16", "127.0.0.1", "fd00:1::/32"];
        for address in ["10.1.2.3", "127.0.0.1", "::ffff:127.0.0.1", "64:ff9b::10.1.0.1", "fd00:1::7", "1.1.1.1"] {
            assert!(allowed(address, &networks), "{address}");
        }
        for address in ["10.2.0.1", "127.0.0.2", "fd00:2::7", "169.254.169.254", "::1"] {
            assert!(!allowed(address, &networks), "{address}");
        }
        assert!(allowed("169.254.169.254", &["0.0.0.0/0"]));
    }

    #[test]
    fn what_is_no_network_is_refused() {
        for text in ["", "10.0.0.0/33", "10.0.0/8", "fd00::/129", "10.0.0.0/", "10.0.0.0/x", "10.0.0.0/8/8", "any"] {
            assert_eq!(Network::parse(text), Err(Error(text.to_owned())));
        }
    }
}
