//! What is in the memory of the guest: texts that are looked for, and such that are left there.
//!
//! Both are given disguised, each byte changed by [`MASK`] and in hex, so that the question does not bring what it asks for.

use std::{hint::black_box, mem};

use pilothouse_sdk::Failure;

const MASK: u8 = 0x5a;
/// How much is filled with what is left. It is more than the host keeps of a memory between two calls, which it clears in another way
/// than the rest.
const ROOM: usize = 5 << 20;

/// Fills memory with the text, and gives none of it back.
pub(crate) fn leave(disguised: &str) -> Result<(), Failure> {
    let text: Vec<_> = bytes(disguised)?.iter().map(|byte| byte ^ MASK).collect();
    mem::forget(black_box(text.repeat(ROOM / text.len().max(1))));
    Ok(())
}

/// In how many places each text is: in what the guest has used, and in as much again as [`leave`] would fill.
pub(crate) fn count(disguised: &[String]) -> Result<Vec<usize>, Failure> {
    let texts = disguised.iter().map(|text| bytes(text)).collect::<Result<Vec<_>, _>>()?;
    let mut counts = vec![0; texts.len()];
    if texts.is_empty() {
        return Ok(counts);
    }
    drop(black_box(Vec::<u8>::with_capacity(ROOM + ROOM / 5)));
    let size = size();
    let is_at = |text: &[u8], at: usize| {
        at + text.len() <= size && text.iter().zip(at..).all(|(byte, at)| byte_at(at) ^ MASK == *byte)
    };
    let mut begins = [false; 256];
    texts.iter().filter_map(|text| text.first()).for_each(|byte| begins[usize::from(*byte)] = true);
    // No reference to 0 is valid, and nothing is there.
    for at in (1..size).filter(|at| begins[usize::from(byte_at(*at) ^ MASK)]) {
        for (count, text) in counts.iter_mut().zip(&texts) {
            *count += usize::from(is_at(text, at));
        }
    }
    Ok(counts)
}

fn bytes(disguised: &str) -> Result<Vec<u8>, Failure> {
    let pair = |at: usize| disguised.get(at..at + 2).unwrap_or_default();
    Ok((0..disguised.len()).step_by(2).map(|at| u8::from_str_radix(pair(at), 16)).collect::<Result<_, _>>()?)
}

#[cfg(target_family = "wasm")]
fn size() -> usize {
    core::arch::wasm32::memory_size(0) << 16
}

#[cfg(target_family = "wasm")]
#[expect(unsafe_code, reason = "what is looked for is in no value of this program")]
fn byte_at(at: usize) -> u8 {
    // SAFETY: it is within the memory, each byte of which can be read, whatever it is a part of.
    unsafe { std::ptr::with_exposed_provenance::<u8>(at).read_volatile() }
}

/// Outside of the sandbox there is nothing to look at.
#[cfg(not(target_family = "wasm"))]
fn size() -> usize {
    0
}

#[cfg(not(target_family = "wasm"))]
fn byte_at(_: usize) -> u8 {
    0
}
