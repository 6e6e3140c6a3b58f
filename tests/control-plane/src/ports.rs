//! Loopback ports that stay ours while the control plane lives, also those of a server that is stopped.

use std::{
    io,
    net::{Ipv4Addr, TcpListener},
    process,
};

/// Below the range from which the kernel gives ports to whoever asks for any.
const FIRST: u16 = 20_000;
const BLOCKS: u16 = 3_000;
const BLOCK: u16 = 4;

/// A block of ports. Its first port is bound for as long as this value lives: that is the lock on the other three.
#[derive(Debug)]
pub(crate) struct Ports {
    pub(crate) etcd: u16,
    pub(crate) etcd_peer: u16,
    pub(crate) api_server: u16,
    _lock: TcpListener,
}

impl Ports {
    /// Takes the first free block, from a place that differs from process to process.
    pub(crate) fn take() -> io::Result<Self> {
        let start = u16::try_from(process::id() % u32::from(BLOCKS)).unwrap_or(0);
        (0..BLOCKS)
            .map(|step| FIRST + (start + step) % BLOCKS * BLOCK)
            .find_map(|base| Self::try_block(base).ok())
            .ok_or_else(|| io::Error::new(io::ErrorKind::AddrInUse, "no free block of loopback ports"))
    }

    fn try_block(base: u16) -> io::Result<Self> {
        let bind = |port| TcpListener::bind((Ipv4Addr::LOCALHOST, port));
        let lock = bind(base)?;
        let ports = Self { etcd: base + 1, etcd_peer: base + 2, api_server: base + 3, _lock: lock };
        for port in [ports.etcd, ports.etcd_peer, ports.api_server] {
            bind(port)?;
        }
        Ok(ports)
    }
}

#[cfg(test)]
mod tests {
    use std::io;

    use super::Ports;

    #[test]
    fn two_control_planes_share_no_port() -> io::Result<()> {
        let (one, two) = (Ports::take()?, Ports::take()?);
        assert!(one.etcd.abs_diff(two.etcd) >= 4, "{one:?} {two:?}");
        Ok(())
    }
}
