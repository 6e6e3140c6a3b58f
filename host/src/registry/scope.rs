//! Which repositories a text is for, as the keys of a docker config are: a host, a host with its port, or either with a path.
//!
//! The rules are those of the kubelet, with one exception: a path ends where a part of it does. `team` is not for `teamwork`, though
//! the kubelet would have it so.

use super::reference::Repository;

/// See the module's documentation.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Scope {
    /// A host, where `*` stands for any part of a name, and a port if there is one.
    host: String,
    /// What a repository's name begins with, without slashes around it.
    path: String,
}

impl Scope {
    pub(crate) fn read(text: &str) -> Self {
        let text = text.strip_prefix("https://").or_else(|| text.strip_prefix("http://")).unwrap_or(text);
        let (host, path) = text.split_once('/').unwrap_or((text, ""));
        // The version of a registry's protocol, which docker used to write there, is no path.
        let path = match path.split_once('/') {
            Some(("v1" | "v2", rest)) => rest,
            None if matches!(path, "v1" | "v2") => "",
            _ => path,
        };
        Self { host: host.to_ascii_lowercase(), path: path.trim_matches('/').to_owned() }
    }

    pub(crate) fn path(&self) -> &str {
        &self.path
    }

    pub(crate) fn covers(&self, repository: &Repository) -> bool {
        let rest = repository.name.strip_prefix(&self.path);
        let path = self.path.is_empty() || rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('/'));
        // Docker Hub has several names, and docker writes down the one that nobody else uses.
        let hub = is_docker_hub(&self.host) && is_docker_hub(&repository.registry);
        path && (hub || is_host(&self.host, &repository.registry))
    }

    /// The greater, the sooner: the longer path, then the host without a star.
    pub(crate) fn precision(&self) -> (usize, bool) {
        (self.path.len(), !self.host.contains('*'))
    }
}

fn is_docker_hub(host: &str) -> bool {
    matches!(host, "docker.io" | "index.docker.io" | "registry-1.docker.io")
}

/// Part by part, so that `*.example.com` is for `a.example.com` and not for `a.b.example.com`.
fn is_host(pattern: &str, host: &str) -> bool {
    if !pattern.contains('*') {
        return pattern == host;
    }
    let split = |text: &str| {
        let (name, port) = text.split_once(':').unwrap_or((text, ""));
        (name.split('.').map(str::to_owned).collect::<Vec<_>>(), port.to_owned())
    };
    let ((patterns, port), (parts, of_host)) = (split(pattern), split(host));
    let fits = |(pattern, part): (&String, &String)| match pattern.split_once('*') {
        None => pattern == part,
        Some((start, end)) => part.len() >= start.len() + end.len() && part.starts_with(start) && part.ends_with(end),
    };
    port == of_host && patterns.len() == parts.len() && patterns.iter().zip(&parts).all(fits)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn covers(scope: &str, repository: &str) -> bool {
        let (registry, name) = repository.split_once('/').unwrap();
        Scope::read(scope).covers(&Repository { registry: registry.to_owned(), name: name.to_owned() })
    }

    #[test]
    fn a_path_ends_with_one_of_its_parts() {
        assert!(
            covers("r.io", "r.io/team/app") && covers("r.io/team", "r.io/team/app") && covers("r.io/team", "r.io/team")
        );
        assert!(!covers("r.io/team", "r.io/teamwork") && !covers("r.io/team/app", "r.io/team"));
        assert!(covers("https://r.io:5001/v2/", "r.io:5001/x") && covers("http://r.io/v1/team", "r.io/team/x"));
    }

    #[test]
    fn a_port_is_part_of_the_host_and_a_star_stands_for_one_part_of_its_name() {
        assert!(!covers("r.io", "r.io:5000/x") && !covers("r.io:5000", "r.io/x") && covers("R.io:5000", "r.io:5000/x"));
        assert!(covers("*.r.io", "a.r.io/x") && covers("a*.r.io", "abc.r.io/x") && covers("*.r.io:1", "a.r.io:1/x"));
        assert!(!covers("*.r.io", "r.io/x") && !covers("*.r.io", "a.b.r.io/x") && !covers("*.r.io", "a.r.io:1/x"));
        assert!(Scope::read("a.r.io").precision() > Scope::read("*.r.io").precision());
    }

    #[test]
    fn docker_hub_is_known_by_each_of_its_names() {
        assert!(covers("https://index.docker.io/v1/", "docker.io/acme/x"));
    }
}
