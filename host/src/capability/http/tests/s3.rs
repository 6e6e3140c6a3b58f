//! Signatures, judged by a real S3 server; and on top of them the client that authors of plugins have.

use ::s3::{ACCESS_KEY_ID, Options, REGION, SECRET_ACCESS_KEY, Server};
use pilothouse_sdk::{
    http as client,
    s3::{Deleted, Error, S3},
    testing::with_http,
};
use serde_json::json;
use tokio::runtime::Handle;

use super::*;

const KEYS: [(&str, &str); 2] = [("accessKeyId", ACCESS_KEY_ID), ("secretAccessKey", SECRET_ACCESS_KEY)];

fn reach(server: &Server) -> Arc<Reach> {
    let mut aws = secret_ref();
    aws["region"] = json!(REGION);
    aws["service"] = json!("s3");
    let methods = ["GET", "HEAD", "PUT", "POST", "DELETE"];
    let grant =
        grant(&server.url(), json!({ "methods": methods, "auth": { "awsSigV4": aws }, "ca": server.authority() }));
    Arc::new(Reach::new(json!([grant]), &KEYS))
}

/// Does what a plugin does, whose requests go through the capability.
async fn as_plugin<T: Send + 'static>(reach: &Arc<Reach>, work: impl FnOnce(S3) -> T + Send + 'static) -> T {
    let (reach, handle) = (reach.clone(), Handle::current());
    let send = move |request: &client::Request| {
        let client::Request { grant, method, target, headers, body, timeout } = request.clone();
        let timeout = timeout.map(|timeout| u32::try_from(timeout.as_millis()).expect("it is short"));
        let request = Request { grant, method, target, headers, body, timeout };
        match handle.block_on(reach.send(request)) {
            Ok(answer) => {
                let new = client::Response::new(answer.status).with_body(answer.body);
                Ok(answer.headers.into_iter().fold(new, |new, (name, value)| new.with_header(&name, value)))
            }
            Err(error) => Err(client::Error::Connection(error.to_string())),
        }
    };
    tokio::task::spawn_blocking(move || with_http(send, || work(S3::new("api")))).await.expect("it does not panic")
}

#[tokio::test]
async fn a_bucket_comes_is_used_and_goes() {
    for tls in [false, true] {
        let server = Server::start(Options { tls, versions: false }).expect("it starts");
        let reach = reach(&server);
        as_plugin(&reach, |s3| {
            assert_eq!(s3.head_bucket("store"), Ok(false));
            assert_eq!(s3.delete_bucket("store"), Ok(Deleted::Gone), "what is not there is gone");
            assert_eq!(s3.create_bucket("store", None), Ok(()));
            assert_eq!(s3.create_bucket("store", None), Ok(()), "it is ours already");
            assert_eq!(s3.head_bucket("store"), Ok(true));
            let keys = ["a b+c&d<e>'\"%41ä$@=:,;!*()~", "plain", "x/y z/w"];
            for key in keys {
                s3.put_object("store", key, "text/plain", key).unwrap_or_else(|error| panic!("{key} {error}"));
                assert_eq!(
                    s3.get_object("store", key).map(|it| it.as_deref() == Some(key.as_bytes())),
                    Ok(true),
                    "{key}"
                );
            }
            let page = s3.list_objects("store", "", None).expect("it lists");
            assert_eq!(page.objects.iter().map(|object| object.key.as_str()).collect::<Vec<_>>(), keys);
            assert_eq!((page.objects[1].size, page.next), (5, None));
            assert_eq!(s3.list_objects("store", "x/", None).expect("it lists").objects.len(), 1);
            assert_eq!(s3.delete_bucket("store"), Ok(Deleted::NotEmpty));

            assert_eq!(s3.head_object("store", "plain"), Ok(true));
            assert_eq!(s3.delete_object("store", "plain"), Ok(()));
            assert_eq!(s3.delete_object("store", "plain"), Ok(()), "it is gone already");
            assert_eq!((s3.head_object("store", "plain"), s3.get_object("store", "plain")), (Ok(false), Ok(None)));
            assert_eq!(s3.delete_object("nowhere", "plain"), Ok(()));
            assert_eq!(s3.remove_bucket("store"), Ok(Deleted::Gone));
            assert_eq!(s3.remove_bucket("store"), Ok(Deleted::Gone), "it is gone already");
        })
        .await;
        assert_eq!(server.buckets().expect("it has a folder"), [] as [String; 0]);
    }
}

#[tokio::test]
async fn versions_and_delete_markers_go_with_the_bucket() {
    let server = Server::start(Options { versions: true, tls: false }).expect("it starts");
    let reach = reach(&server);
    as_plugin(&reach, |s3| {
        s3.create_bucket("store", None).expect("it is made");
        let body = "<VersioningConfiguration><Status>Enabled</Status></VersioningConfiguration>";
        let answer = client::put("api", "/store?versioning=").body(body).send().expect("there is an answer");
        assert_eq!(answer.status, 200, "{:?}", answer.text());
        for body in ["first", "second"] {
            s3.put_object("store", "a", "text/plain", body).expect("it is written");
        }
        s3.put_object("store", "b", "text/plain", "b").expect("it is written");
        s3.delete_object("store", "a").expect("it is hidden");
        assert_eq!(s3.list_objects("store", "", None).expect("it lists").objects.len(), 1);
        assert_eq!(s3.delete_bucket("store"), Ok(Deleted::NotEmpty));
        assert_eq!(s3.remove_bucket("store"), Ok(Deleted::Gone));
    })
    .await;
    assert_eq!(server.buckets().expect("it has a folder"), [] as [String; 0]);
}

#[tokio::test]
async fn more_than_a_page_is_listed_and_deleted_page_by_page() {
    let server = Server::start(Options::default()).expect("it starts");
    let reach = reach(&server);
    as_plugin(&reach, |s3| s3.create_bucket("store", None)).await.expect("it is made");
    for number in 0..1005 {
        server.put_object("store", &format!("{number:04}"), "x").expect("it is written");
    }
    as_plugin(&reach, |s3| {
        let first = s3.list_objects("store", "", None).expect("it lists");
        assert_eq!(first.objects.len(), 1000);
        let rest = s3.list_objects("store", "", first.next.as_deref()).expect("it lists");
        assert_eq!((rest.objects.len(), rest.objects[0].key.as_str(), rest.next), (5, "1000", None));
        assert_eq!(s3.remove_bucket("store"), Ok(Deleted::NotEmpty));
        assert_eq!(s3.remove_bucket("store"), Ok(Deleted::Gone));
    })
    .await;
}

#[tokio::test]
async fn who_is_refused_has_deleted_nothing_and_a_new_key_holds_at_once() {
    let mut server = Server::start(Options::default()).expect("it starts");
    let reach = reach(&server);
    as_plugin(&reach, |s3| s3.create_bucket("store", None)).await.expect("it is made");
    reach.rotate(&[("accessKeyId", ACCESS_KEY_ID), ("secretAccessKey", "another")]);
    let refused = as_plugin(&reach, |s3| s3.remove_bucket("store")).await;
    let is_refused = |code: &str| code == "SignatureDoesNotMatch";
    assert!(matches!(&refused, Err(Error::Refused { status: 403, code, .. }) if is_refused(code)), "{refused:?}");
    reach.rotate(&[("accessKeyId", "nobody"), ("secretAccessKey", "another")]);
    let refused = as_plugin(&reach, |s3| s3.delete_bucket("store")).await;
    // This server says 404 to who it does not know; that is not the 404 of a bucket.
    assert!(matches!(&refused, Err(Error::Refused { status: 403 | 404, .. })), "{refused:?}");
    assert_eq!(server.buckets().expect("it has a folder"), ["store"]);

    reach.rotate(&KEYS);
    server.stop();
    let unreachable = as_plugin(&reach, |s3| s3.remove_bucket("store")).await;
    assert!(matches!(unreachable, Err(Error::Http(_))), "{unreachable:?}");
    server.start_again().expect("it starts");
    assert_eq!(as_plugin(&reach, |s3| s3.remove_bucket("store")).await, Ok(Deleted::Gone));
}
