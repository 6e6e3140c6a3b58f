//! Who comes in, and what is said to who does not (`C57`).

use distribution::{Options, Password, Registry};
use pilothouse::{
    connection::Error as Broken,
    registry::{Error, Registries, connection},
};

use crate::{at, closed, component, credentials, nobody, open, reach, reference, told};

#[tokio::test]
async fn c57_a_password_is_taken_by_host_and_port_and_by_path() {
    let (registry, registries) = closed();
    let (place, host) = (at(&registry, "team/plugin:1.0"), registry.host());
    let owner = credentials(&[(&host, "first")]);
    registries.push(&place, component("a"), &owner).await.unwrap();

    let bare = host.split(':').next().unwrap();
    let (team, other) = (format!("{host}/team"), format!("{host}/other"));
    for fits in [&[(host.as_str(), "first")][..], &[(&team, "first")], &[(&host, "wrong"), (&team, "first")]] {
        registries.resolve(&place, &credentials(fits)).await.unwrap_or_else(|error| panic!("{fits:?}: {error}"));
    }
    // Several secrets may be for one place: each is tried.
    registries.resolve(&place, &credentials(&[(&host, "wrong"), (&host, "first")])).await.unwrap();
    // What is for another port, or another path, is not for this one.
    for not in [&[(bare, "first")][..], &[(&other, "first")]] {
        let error = registries.resolve(&place, &credentials(not)).await.unwrap_err();
        assert!(matches!(error, Error::NoCredential(_)), "{not:?}: {error}");
    }
}

#[tokio::test]
async fn c57_a_refused_credential_is_told_as_one_and_nobody_else_as_nobody() {
    let (registry, registries) = closed();
    let place = at(&registry, "team/plugin:1.0");
    let wrong = registries.resolve(&place, &credentials(&[(&registry.host(), "wrong")])).await.unwrap_err();
    assert!(matches!(wrong, Error::Unauthorized(_)), "{wrong}");
    let none = registries.resolve(&place, &nobody()).await.unwrap_err();
    assert!(matches!(none, Error::NoCredential(_)), "{none}");
    for text in [told(&wrong), told(&none)] {
        assert!(text.contains("401") && text.contains(&registry.host()) && text.contains("team/plugin"), "{text}");
    }
}

#[tokio::test]
async fn c57_a_password_that_changes_is_asked_for_at_the_next_request() {
    let (mut registry, registries) = closed();
    let (place, host) = (at(&registry, "plugin:1.0"), registry.host());
    let (first, second) = (credentials(&[(&host, "first")]), credentials(&[(&host, "second")]));
    let digest = registries.push(&place, component("a"), &first).await.unwrap();
    registry.set_password(Password::Second).unwrap();
    let error = registries.pull(place.repository(), &digest, &first).await.unwrap_err();
    assert!(matches!(error, Error::Unauthorized(_)), "{error}");
    registries.pull(place.repository(), &digest, &second).await.unwrap();
}

#[tokio::test]
async fn c57_a_private_authority_is_trusted_where_the_host_was_given_it() {
    let registry = Registry::start(Options { tls: true, password: None }).unwrap();
    let place = at(&registry, "plugin:1.0");
    let trusting = Registries::new(&reach(&registry, true)).unwrap();
    trusting.push(&place, component("a"), &nobody()).await.unwrap();
    let error = Registries::new(&Default::default()).unwrap().resolve(&place, &nobody()).await.unwrap_err();
    assert!(
        matches!(&error, Error::Connection { source: connection::Error::Broken(Broken::Tls { .. }), .. }),
        "{error}"
    );
    let text = told(&error);
    assert!(text.contains("UnknownIssuer") && text.contains("--registry-ca"), "{text}");
    assert!(text.contains(&registry.host()) && text.contains("plugin"), "{text}");
}

#[tokio::test]
async fn c57_plain_http_is_spoken_with_hosts_that_are_listed_for_it_and_no_others() {
    let (registry, listed) = open();
    let place = at(&registry, "plugin:1.0");
    listed.push(&place, component("a"), &nobody()).await.unwrap();
    let before = registry.requests().unwrap().len();
    let error = Registries::new(&Default::default()).unwrap().resolve(&place, &nobody()).await.unwrap_err();
    let text = told(&error);
    assert!(text.contains("TLS") && text.contains("--insecure-registry"), "{text}");
    assert_eq!(registry.requests().unwrap()[before..], [] as [String; 0], "nothing was asked in plain text");
}

#[tokio::test]
async fn c57_what_is_not_there_is_named() {
    let (registry, registries) = open();
    let place = at(&registry, "plugin:1.0");
    let error = registries.resolve(&place, &nobody()).await.unwrap_err();
    assert!(matches!(&error, Error::NoRepository(_) | Error::NoManifest { .. }), "{error}");
    registries.push(&place, component("a"), &nobody()).await.unwrap();
    let error = registries.resolve(&at(&registry, "plugin:2.0"), &nobody()).await.unwrap_err();
    assert!(told(&error).contains("has no tag 2.0 in repository plugin (404)"), "{}", told(&error));
}

#[tokio::test]
async fn c57_a_name_that_nobody_knows_and_a_port_where_nobody_listens_are_told_apart() {
    let registries = Registries::new(&Default::default()).unwrap();
    let unknown = registries.resolve(&reference("registry.invalid/plugin:1.0"), &nobody()).await.unwrap_err();
    assert!(
        matches!(&unknown, Error::Connection { source: connection::Error::Broken(Broken::Name { .. }), .. }),
        "{unknown}"
    );
    assert!(told(&unknown).contains("failed to look up the name registry.invalid"), "{}", told(&unknown));

    let (mut registry, registries) = open();
    registry.stop();
    let refused = registries.resolve(&at(&registry, "plugin:1.0"), &nobody()).await.unwrap_err();
    assert!(
        matches!(&refused, Error::Connection { source: connection::Error::Broken(Broken::Connect { .. }), .. }),
        "{refused}"
    );
    assert!(told(&refused).contains("Connection refused"), "{}", told(&refused));
}

#[tokio::test]
async fn a_registry_that_comes_back_is_waited_for() {
    let (mut registry, registries) = open();
    let place = at(&registry, "plugin:1.0");
    let digest = registries.push(&place, component("a"), &nobody()).await.unwrap();
    registry.stop();
    let resolving = tokio::spawn(async move { registries.resolve(&place, &nobody()).await });
    tokio::task::yield_now().await;
    registry.start_again().unwrap();
    assert_eq!(resolving.await.unwrap().unwrap(), digest);
}
