//! What a digest means, and that nothing else is taken for it (`C55`).

use std::fs;

use pilothouse::registry::Error;

use crate::{at, component, digest, nobody, open, told};

#[tokio::test]
async fn a_component_comes_back_as_it_was_pushed() {
    let (registry, registries) = open();
    let (place, bytes) = (at(&registry, "team/plugin:1.0"), component("a"));
    let pushed = registries.push(&place, bytes.clone(), &nobody()).await.unwrap();
    assert_eq!(registries.resolve(&place, &nobody()).await.unwrap(), pushed);
    let pulled = registries.pull(place.repository(), &pushed, &nobody()).await.unwrap();
    assert_eq!((pulled.bytes, pulled.digest, pulled.component), (bytes.clone(), pushed.clone(), digest(&bytes)));
    // Once more, to a place of another name: the same component has the same digest.
    let elsewhere = at(&registry, "other/plugin:2.0");
    assert_eq!(registries.push(&elsewhere, bytes, &nobody()).await.unwrap(), pushed);
}

#[tokio::test]
async fn c55_a_tag_that_moves_is_resolved_anew_and_what_it_was_stays() {
    let (registry, registries) = open();
    let place = at(&registry, "plugin:latest");
    let first = registries.push(&place, component("first"), &nobody()).await.unwrap();
    let second = registries.push(&place, component("second"), &nobody()).await.unwrap();
    assert_ne!(first, second);
    assert_eq!(registries.resolve(&place, &nobody()).await.unwrap(), second);
    let pinned = place.pinned(first.clone());
    assert_eq!(registries.resolve(&pinned, &nobody()).await.unwrap(), first, "the digest counts, and not the tag");
    let pulled = registries.pull(place.repository(), &first, &nobody()).await.unwrap();
    assert_eq!(pulled.bytes, component("first"));
}

#[tokio::test]
async fn c55_a_damaged_component_is_refused_with_both_digests() {
    let (registry, registries) = open();
    let (place, bytes) = (at(&registry, "plugin:1.0"), component("whole"));
    let pushed = registries.push(&place, bytes.clone(), &nobody()).await.unwrap();
    let file = registry.file_of(digest(&bytes).as_str());

    let mut damaged = bytes.clone();
    *damaged.last_mut().unwrap() ^= 1;
    fs::write(&file, &damaged).unwrap();
    let error = registries.pull(place.repository(), &pushed, &nobody()).await.unwrap_err();
    let Error::WrongDigest { expected, found, .. } = &error else { panic!("{error}") };
    assert_eq!((expected, found), (&digest(&bytes), &digest(&damaged)));
    let text = told(&error);
    assert!(text.contains(expected.as_str()) && text.contains(found.as_str()), "{text}");
    assert!(text.contains(&registry.host()) && text.contains("plugin"), "{text}");

    fs::write(&file, &bytes[..bytes.len() - 3]).unwrap();
    let error = registries.pull(place.repository(), &pushed, &nobody()).await.unwrap_err();
    let Error::WrongSize { expected, found, .. } = &error else { panic!("{error}") };
    assert_eq!((*expected, *found), (bytes.len() as u64, bytes.len() as u64 - 3), "truncated: {error}");

    fs::remove_file(&file).unwrap();
    let error = registries.pull(place.repository(), &pushed, &nobody()).await.unwrap_err();
    assert!(matches!(&error, Error::NoBlob { .. }), "{error}");

    fs::write(&file, &bytes).unwrap();
    assert_eq!(registries.pull(place.repository(), &pushed, &nobody()).await.unwrap().bytes, bytes);
}

#[tokio::test]
async fn c55_a_damaged_manifest_is_refused() {
    let (registry, registries) = open();
    let place = at(&registry, "plugin:1.0");
    let pushed = registries.push(&place, component("a"), &nobody()).await.unwrap();
    let file = registry.file_of(pushed.as_str());
    let manifest = fs::read_to_string(&file).unwrap();
    fs::write(&file, manifest.replace("application/wasm", "application/sawm")).unwrap();
    let error = registries.pull(place.repository(), &pushed, &nobody()).await.unwrap_err();
    assert!(matches!(&error, Error::WrongDigest { expected, .. } if *expected == pushed), "{error}");
}

#[tokio::test]
async fn c55_the_digest_of_the_component_is_no_pin_and_the_error_says_so() {
    let (registry, registries) = open();
    let (place, bytes) = (at(&registry, "plugin:1.0"), component("a"));
    registries.push(&place, bytes.clone(), &nobody()).await.unwrap();
    let error = registries.pull(place.repository(), &digest(&bytes), &nobody()).await.unwrap_err();
    assert!(matches!(&error, Error::NotTheManifest { digest: pinned, .. } if *pinned == digest(&bytes)), "{error}");

    let error = registries.pull(place.repository(), &digest(b"nothing"), &nobody()).await.unwrap_err();
    let text = told(&error);
    assert!(matches!(&error, Error::NoManifest { .. }), "{error}");
    assert!(text.contains("404") && text.contains(digest(b"nothing").as_str()) && text.contains("plugin"), "{text}");
}
