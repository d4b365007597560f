if [ -n "$rows" ]; then
    if [ -d "$rows" ]; then
        name="rows/{client}.${kind##*.}"
        cp -r "$rows" "$here/rows"
    else
        name=rows.${rows##*.}
        cp "$rows" "$here/$name"
    fi
    sed "s|^file = \"[^\"]*\"|file = \"$name\"|" "$here/node.toml" > "$here/node.new"
    mv "$here/node.new" "$here/node.toml"
fi
if [ -n "$target" ]; then
    # First for TOML, then for sed.
    escaped=$(printf '%s' "$target" | sed -e 's/[\\"]/\\&/g' -e 's/[\\&|]/\\&/g')
    sed "s|^# target = \"label\" .*|target = \"$escaped\"|" "$here/node.toml" > "$here/node.new"
    mv "$here/node.new" "$here/node.toml"
fi
[ -e "$here/node.key" ] || "$environment/bin/fedblend" federation keys "$here/node.toml"
if [ -z "$ROOT" ]; then
    for user in @user@ @flower_user@; do
        id -u "$user" >/dev/null 2>&1 || useradd --system --user-group \
            --home-dir @home@ --shell /usr/sbin/nologin "$user"
    done
    usermod --append --groups @flower_user@ @user@
    chown -R @user@: @home@
    chown -R @flower_user@: "$here/flower" "$here/node.key"
    chmod 711 @home@ "$here"
    chmod 644 "$here/node.toml" "$here/ca.crt"
    install -m 644 "$here/fedblend-worker.service" "$here/fedblend-node.service" \
        /etc/systemd/system/
    systemctl daemon-reload
    if [ -n "$rows" ]; then
        systemctl enable --now fedblend-worker fedblend-node
        await "$here/worker/socket"
    fi
    ln -sf "$environment/bin/fedblend" /usr/local/bin/fedblend
    "$environment/bin/fedblend" federation doctor "$here/node.toml" || true
fi
echo "the node is in $here; read policy.toml there"
[ -n "$rows" ] || echo "name its rows in node.toml, then start fedblend-worker and fedblend-node"
