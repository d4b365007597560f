if [ -z "$ROOT" ]; then
    id -u @user@ >/dev/null 2>&1 || useradd --system --user-group \
        --home-dir @home@ --shell /usr/sbin/nologin @user@
    chown -R @user@: @home@
    install -m 644 "$here/nginx.conf" /etc/nginx/conf.d/fedblend.conf
    nginx -t
    install -m 644 "$here/fedblend-link.service" /etc/systemd/system/
    systemctl daemon-reload
    systemctl enable --now fedblend-link
    systemctl reload-or-restart nginx
    await "$here/state/members.json"
    ln -sf "$environment/bin/fedblend" /usr/local/bin/fedblend
    "$environment/bin/fedblend" federation doctor "$here/server.toml" || true
fi
echo "the server is in $here"
